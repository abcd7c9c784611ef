#include <stdio.h>

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static void put_group(const char bytes[3], size_t count)
{
    unsigned long bits = (unsigned long)bytes[0] << 16 | (unsigned long)bytes[1] << 8 | (unsigned long)bytes[2];
    for (size_t i = 0; i <= count; i++)
        putchar(alphabet[bits >> (18 - 6 * i) & 63]);
}

int main(void)
{
    char bytes[3] = {0, 0, 0};
    size_t count;
    while ((count = fread(bytes, 1, 3, stdin)) > 0)
        put_group(bytes, count);
    return 0;
}
