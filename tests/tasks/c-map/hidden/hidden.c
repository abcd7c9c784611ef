#include "map.h"

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition) do { if (!(condition)) { printf("line %d: %s\n", __LINE__, #condition); return 1; } } while (0)
#define KEYS 40

static struct map map;

int main(void)
{
    int value = 0, known[KEYS];
    CHECK(map_put(&map, 1, 10) && map_get(&map, 1, &value) && value == 10);
    CHECK(!map_get(&map, 2, &value) && !map_remove(&map, 2));
    CHECK(map_put(&map, 1, 11) && map_get(&map, 1, &value) && value == 11 && map_count(&map) == 1);
    CHECK(map_put(&map, 1 + MAP_SLOTS, 20) && map_remove(&map, 1));
    CHECK(map_get(&map, 1 + MAP_SLOTS, &value) && value == 20 && !map_get(&map, 1, &value));
    CHECK(map_remove(&map, 1 + MAP_SLOTS) && map_count(&map) == 0);

    /* Random changes against an array; many keys share slots, and far more keys come and go than there are slots. */
    srand(5);
    for (int i = 0; i < KEYS; i++)
        known[i] = -1;
    for (int round = 0; round < 20000; round++) {
        int i = rand() % KEYS;
        unsigned key = (unsigned)i * 16;
        if (rand() % 2) {
            known[i] = round;
            CHECK(map_put(&map, key, round));
        } else {
            CHECK(map_remove(&map, key) == (known[i] >= 0));
            known[i] = -1;
        }
        for (int j = 0; j < KEYS; j++) {
            bool found = map_get(&map, (unsigned)j * 16, &value);
            CHECK(found == (known[j] >= 0) && (!found || value == known[j]));
        }
    }
    return 0;
}
