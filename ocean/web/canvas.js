/* The part of raylib that draw.h and main.c declare, on a canvas: an emscripten library (emcc --js-library). Structures
 * come as addresses: Color is four bytes, Vector2 two and Rectangle four floats. Keys have raylib's numbers. */
const canvasLibrary = {
  // down: keys; pressed: keys and mouse buttons ("m0") since the last frame
  $view: "{ open: false, down: new Set(), pressed: new Set(), mouse: [0, 0] }",
  $viewColor: function (address) {
    const [r, g, b, a] = HEAPU8.subarray(address, address + 4);
    return `rgba(${r}, ${g}, ${b}, ${a / 255})`;
  },
  $viewFloats: function (address, count) {
    return HEAPF32.subarray(address >> 2, (address >> 2) + count);
  },
  $viewFont: function (size) {
    view.context.font = `${size}px "DejaVu Sans Mono", Menlo, Consolas, monospace`;
  },
  $viewKey: function (event) {
    const named = { Space: 32, Escape: 256, Enter: 257, ArrowRight: 262, ArrowLeft: 263, ArrowDown: 264, ArrowUp: 265 };
    const match = /^(?:Key|Digit|Numpad)(.)$/.exec(event.code);
    return match ? match[1].charCodeAt(0) : named[event.code];
  },
  $viewListen: function () {
    addEventListener("keydown", (event) => {
      const key = viewKey(event);
      if (key === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      if (!event.repeat) view.pressed.add(key);
      view.down.add(key);
      event.preventDefault(); // the arrows and the space bar would scroll the page
    });
    addEventListener("keyup", (event) => view.down.delete(viewKey(event)));
    addEventListener("blur", () => view.down.clear());
    view.canvas.addEventListener("mousedown", (event) => {
      const box = view.canvas.getBoundingClientRect();
      view.mouse = [
        Math.floor(((event.clientX - box.left) * view.canvas.width) / box.width),
        Math.floor(((event.clientY - box.top) * view.canvas.height) / box.height),
      ];
      view.pressed.add("m" + event.button);
    });
  },

  InitWindow: function (width, height, title) {
    if (!view.canvas) {
      view.canvas = Module.canvas;
      view.context = view.canvas.getContext("2d");
      viewListen();
    }
    view.canvas.width = width;
    view.canvas.height = height;
    document.title = UTF8ToString(title);
    view.open = true;
  },
  IsWindowReady: function () {
    return Number(view.open);
  },
  CloseWindow: function () {
    view.open = false;
  },
  SetTraceLogLevel: function () {},
  GetScreenWidth: function () {
    return view.open ? view.canvas.width : 0;
  },
  GetScreenHeight: function () {
    return view.open ? view.canvas.height : 0;
  },
  BeginDrawing: function () {},
  EndDrawing: function () {
    view.pressed.clear();
  },

  IsKeyDown: function (key) {
    return Number(view.down.has(key) || view.pressed.has(key));
  },
  IsKeyPressed: function (key) {
    return Number(view.pressed.has(key));
  },
  IsMouseButtonPressed: function (button) {
    return Number(view.pressed.has("m" + button));
  },
  GetMouseX: function () {
    return view.mouse[0];
  },
  GetMouseY: function () {
    return view.mouse[1];
  },

  ClearBackground: function (color) {
    view.context.fillStyle = viewColor(color);
    view.context.fillRect(0, 0, view.canvas.width, view.canvas.height);
  },
  DrawText: function (text, x, y, size, color) {
    viewFont(size);
    view.context.fillStyle = viewColor(color);
    view.context.fillText(UTF8ToString(text), x, y + 0.8 * size);
  },
  MeasureText: function (text, size) {
    viewFont(size);
    return Math.round(view.context.measureText(UTF8ToString(text)).width);
  },
  DrawLineEx: function (from, to, thickness, color) {
    view.context.strokeStyle = viewColor(color);
    view.context.lineWidth = thickness;
    view.context.beginPath();
    view.context.moveTo(...viewFloats(from, 2));
    view.context.lineTo(...viewFloats(to, 2));
    view.context.stroke();
  },
  DrawRectangle: function (x, y, width, height, color) {
    view.context.fillStyle = viewColor(color);
    view.context.fillRect(x, y, width, height);
  },
  DrawRectangleRec: function (rectangle, color) {
    view.context.fillStyle = viewColor(color);
    view.context.fillRect(...viewFloats(rectangle, 4));
  },
  DrawCircleV: function (centre, radius, color) {
    view.context.fillStyle = viewColor(color);
    view.context.beginPath();
    view.context.arc(...viewFloats(centre, 2), Math.max(radius, 0), 0, 2 * Math.PI);
    view.context.fill();
  },
  DrawCircleLinesV: function (centre, radius, color) {
    view.context.strokeStyle = viewColor(color);
    view.context.lineWidth = 1;
    view.context.beginPath();
    view.context.arc(...viewFloats(centre, 2), Math.max(radius, 0), 0, 2 * Math.PI);
    view.context.stroke();
  },
  DrawRing: function (centre, inner, outer, from, to, segments, color) {
    const [x, y] = viewFloats(centre, 2), start = (from * Math.PI) / 180, end = (to * Math.PI) / 180;
    view.context.fillStyle = viewColor(color);
    view.context.beginPath();
    view.context.arc(x, y, outer, start, end, to < from);
    view.context.arc(x, y, inner, end, start, to >= from);
    view.context.fill();
  },
  DrawTriangle: function (a, b, c, color) {
    const context = view.context;
    context.fillStyle = context.strokeStyle = viewColor(color);
    context.beginPath();
    for (const corner of [a, b, c]) context.lineTo(...viewFloats(corner, 2));
    context.closePath();
    context.fill();
    if (HEAPU8[color + 3] === 255) { // a hairline over the seam to the next triangle of a quad
      context.lineWidth = 1;
      context.stroke();
    }
  },
};

for (const name of Object.keys(canvasLibrary)) {
  const needs = canvasLibrary[name].toString().match(/\bview\w*/g) || [];
  canvasLibrary[name + "__deps"] = [...new Set(needs)].map((other) => "$" + other);
}
mergeInto(LibraryManager.library, canvasLibrary);
