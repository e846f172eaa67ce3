#define OBSERVATION float
#include "env.h"
struct Env { ENV_COMMON int x }
