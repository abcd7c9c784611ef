#include "join.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void)
{
    const char *words[] = {"a", "bc", "d"};
    char *text = join(words, 3, "");
    int bad = text == NULL || strcmp(text, "abcd") != 0;
    free(text);
    puts(bad ? "failed" : "passed");
    return bad;
}
