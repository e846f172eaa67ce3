from user_envs import *  # noqa: F403  the name that bench/ and other tests have
