#include "join.h"

#include <stdlib.h>
#include <string.h>

char *join(const char *const *words, size_t count, const char *separator)
{
    size_t length = 1;
    for (size_t i = 0; i < count; i++)
        length += strlen(words[i]);
    if (count == 0)
        return NULL;
    char *text = calloc(length, 1);
    if (text == NULL)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        strcat(text, words[i]);
        strcat(text, separator);
    }
    return text;
}
