# Everything to train, test and record video in a container. On a CPU:
#   docker build -t trainer . && docker run -it --rm trainer python pufferl.py train breakout
# On NVIDIA GPUs (the host needs the NVIDIA container toolkit):
#   docker build -t trainer --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 --build-arg TORCH=cu130 .
#   docker run -it --rm --gpus all trainer python pufferl.py train breakout --train.device cuda
#   with a driver below 580: BASE=nvidia/cuda:12.6.3-devel-ubuntu24.04 and TORCH=cu126
# --build-arg EXTRAS=1 adds the third-party environments of requirements/extras.txt and -nodeps.txt, and Java for MicroRTS.
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG TORCH=cpu
ARG EXTRAS=0

# gcc compiles the C environments; swig and the GL libraries are what Box2D, MuJoCo, Atari and ViZDoom build with or load.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates cmake git make python3 python3-dev python3-venv swig \
        libegl1 libgl1 libglfw3 libglib2.0-0 libosmesa6 libsdl2-2.0-0 \
        $([ "$EXTRAS" = 1 ] && echo default-jre-headless) \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH SDL_VIDEODRIVER=dummy MUJOCO_GL=egl
RUN python3 -m venv $VIRTUAL_ENV
WORKDIR /workspace
COPY requirements.txt ./
COPY requirements/ requirements/
RUN case "$TORCH" in cpu) CUDA= ;; cu12*) CUDA="-r requirements/cuda12.txt" ;; *) CUDA="-r requirements/cuda.txt" ;; esac \
    && pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/${TORCH} -r requirements.txt $CUDA \
    && if [ "$EXTRAS" = 1 ]; then pip install --no-cache-dir -r requirements/extras.txt \
        && pip install --no-cache-dir --no-deps -r requirements/nodeps.txt; fi
COPY . .
# make takes the packages that are there already.
RUN ln -s $VIRTUAL_ENV .venv && touch .venv/ready-demo .venv/ready
CMD ["bash"]
