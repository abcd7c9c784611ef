#include "join.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check(const char *const *words, size_t count, const char *separator, const char *expected)
{
    char *text = join(words, count, separator);
    int good = text != NULL && strcmp(text, expected) == 0 && malloc_usable_size(text) > strlen(expected);
    if (!good)
        printf("expected \"%s\", found \"%s\"\n", expected, text ? text : "(null)");
    free(text);
    return !good;
}

int main(void)
{
    const char *words[] = {"one", "two", "", "four"};
    const char *wide = "--------------------------------------------------------------------------------";
    char expected[400];
    snprintf(expected, sizeof expected, "one%stwo%s%sfour", wide, wide, wide);
    return check(words, 4, "", "onetwofour") | check(words, 4, ", ", "one, two, , four") | check(words, 1, ", ", "one")
         | check(words, 0, ", ", "") | check(words, 4, wide, expected);
}
