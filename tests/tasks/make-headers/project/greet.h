#define GREETING "hello"
void greet(void);
