#include <stddef.h>

/* The words with the separator between them, in memory that the caller frees. */
char *join(const char *const *words, size_t count, const char *separator);
