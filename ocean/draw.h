/* The functions of raylib that c_render uses, and a few shared colours. To use another one, add it
 * to the list. In a library for Python each of them is a pointer, which ocean/__init__.py sets from
 * the raylib_software wheel when something is drawn for the first time. So training needs no
 * raylib, and other packages do not see the SDL that is inside that wheel. */
#pragma once

typedef struct { unsigned char r, g, b, a; } Color;
typedef struct { float x, y; } Vector2;
typedef struct { float x, y, width, height; } Rectangle;

#define RAYLIB(X) \
    X(void, InitWindow, (int width, int height, const char* title)) \
    X(_Bool, IsWindowReady, (void)) \
    X(void, CloseWindow, (void)) \
    X(void, SetTraceLogLevel, (int level)) \
    X(int, GetScreenWidth, (void)) \
    X(int, GetScreenHeight, (void)) \
    X(void, BeginDrawing, (void)) \
    X(void, EndDrawing, (void)) \
    X(void, ClearBackground, (Color color)) \
    X(void, DrawText, (const char* text, int x, int y, int size, Color color)) \
    X(int, MeasureText, (const char* text, int size)) \
    X(void, DrawLineEx, (Vector2 from, Vector2 to, float thickness, Color color)) \
    X(void, DrawRectangle, (int x, int y, int width, int height, Color color)) \
    X(void, DrawRectangleRec, (Rectangle rectangle, Color color)) \
    X(void, DrawCircleV, (Vector2 centre, float radius, Color color)) \
    X(void, DrawCircleLinesV, (Vector2 centre, float radius, Color color)) \
    X(void, DrawRing, /* from, to: degrees */ \
      (Vector2 centre, float inner, float outer, float from, float to, int segments, Color color)) \
    /* counter-clockwise on the screen */ \
    X(void, DrawTriangle, (Vector2 a, Vector2 b, Vector2 c, Color color))
#ifdef RAYLIB_POINTERS
#define RAYLIB_DECLARE(result, name, arguments) static result(*name) arguments;
#else
#define RAYLIB_DECLARE(result, name, arguments) result name arguments;
#endif
#ifdef OCEAN_DEVICE /* a GPU draws nothing */
#undef RAYLIB_DECLARE
#define RAYLIB_DECLARE(result, name, arguments) \
    static inline result name arguments { return result(); }
#endif
RAYLIB(RAYLIB_DECLARE)

#define DRAW_BACKGROUND ((Color){12, 20, 28, 255})
#define DRAW_PANEL ((Color){26, 40, 52, 255})
#define DRAW_GREY ((Color){130, 146, 160, 255})
#define DRAW_WHITE ((Color){236, 242, 246, 255})
#define DRAW_CYAN ((Color){0, 187, 204, 255})
#define DRAW_GOLD ((Color){250, 190, 60, 255})
#define DRAW_GREEN ((Color){90, 200, 120, 255})
#define DRAW_RED ((Color){226, 84, 84, 255})

/* Opens this process's only window and begins a frame. An environment of another size gets a new
 * window, because the software renderer fails after SetWindowSize. */
static inline void draw_begin(int width, int height, const char* title) {
    if (IsWindowReady() && (GetScreenWidth() != width || GetScreenHeight() != height))
        CloseWindow();
    if (!IsWindowReady()) {
        SetTraceLogLevel(4); /* prints warnings and errors only */
        InitWindow(width, height, title);
        BeginDrawing(); /* the first frame of a window shows nothing */
        EndDrawing();
    }
    BeginDrawing();
    ClearBackground(DRAW_BACKGROUND);
}

static inline void draw_text_centred(const char* text, int x, int y, int size, Color color) {
    DrawText(text, x - MeasureText(text, size) / 2, y - size / 2, size, color);
}

/* Draws text; the arguments after its place are printf's. */
#define draw_format(x, y, size, color, ...) \
    do { \
        char formatted[128]; \
        snprintf(formatted, sizeof(formatted), __VA_ARGS__); \
        DrawText(formatted, x, y, size, color); \
    } while (0)

/* A triangle, with its corners in either order. */
static inline void draw_triangle(Vector2 a, Vector2 b, Vector2 c, Color color) {
    if ((b.x - a.x) * (c.y - a.y) - (b.y - a.y) * (c.x - a.x) > 0) DrawTriangle(a, c, b, color);
    else DrawTriangle(a, b, c, color);
}

/* Four corners in order, clockwise or counter-clockwise. */
static inline void draw_quad(Vector2 a, Vector2 b, Vector2 c, Vector2 d, Color color) {
    draw_triangle(a, b, c, color);
    draw_triangle(a, c, d, color);
}

/* A colour between two others. */
static inline Color draw_mix(Color from, Color to, float share) {
    return (Color){(unsigned char)(from.r + share * (float)(to.r - from.r)),
                   (unsigned char)(from.g + share * (float)(to.g - from.g)),
                   (unsigned char)(from.b + share * (float)(to.b - from.b)),
                   (unsigned char)(from.a + share * (float)(to.a - from.a))};
}

static inline void draw_end(void) {
    EndDrawing();
}
