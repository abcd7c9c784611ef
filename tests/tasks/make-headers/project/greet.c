#include "greet.h"

#include <stdio.h>

void greet(void)
{
    puts(GREETING);
}
