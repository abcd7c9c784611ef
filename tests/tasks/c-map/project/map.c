#include "map.h"

/* The slot of a key; MAP_SLOTS if there is none. */
static size_t find(const struct map *map, unsigned key)
{
    for (size_t step = 0; step < MAP_SLOTS; step++) {
        size_t at = (key + step) % MAP_SLOTS;
        if (map->slots[at].state == SLOT_EMPTY)
            return MAP_SLOTS;
        if (map->slots[at].key == key)
            return at;
    }
    return MAP_SLOTS;
}

bool map_put(struct map *map, unsigned key, int value)
{
    for (size_t step = 0; step < MAP_SLOTS; step++) {
        size_t at = (key + step) % MAP_SLOTS;
        if (map->slots[at].state == SLOT_EMPTY) {
            map->slots[at].state = SLOT_USED;
            map->slots[at].key = key;
            map->slots[at].value = value;
            return true;
        }
    }
    return false;
}

bool map_get(const struct map *map, unsigned key, int *value)
{
    size_t at = find(map, key);
    if (at == MAP_SLOTS)
        return false;
    *value = map->slots[at].value;
    return true;
}

bool map_remove(struct map *map, unsigned key)
{
    size_t at = find(map, key);
    if (at == MAP_SLOTS)
        return false;
    map->slots[at].state = SLOT_EMPTY;
    return true;
}

size_t map_count(const struct map *map)
{
    size_t count = 0;
    for (size_t at = 0; at < MAP_SLOTS; at++)
        count += map->slots[at].state == SLOT_USED;
    return count;
}
