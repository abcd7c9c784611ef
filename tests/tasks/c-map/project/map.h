#include <stdbool.h>
#include <stddef.h>

#define MAP_SLOTS 64

enum slot_state { SLOT_EMPTY, SLOT_USED };

struct map {
    struct { enum slot_state state; unsigned key; int value; } slots[MAP_SLOTS];
};

/* False if the table is full. */
bool map_put(struct map *map, unsigned key, int value);
bool map_get(const struct map *map, unsigned key, int *value);
bool map_remove(struct map *map, unsigned key);
size_t map_count(const struct map *map);
