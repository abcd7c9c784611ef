import sys


def calculate(line):
    stack = []
    for word in line.split():
        if word in "+-*/":
            a, b = stack.pop(), stack.pop()
            stack.append({"+": a + b, "-": a - b, "*": a * b, "/": a / b}[word])
        else:
            stack.append(float(word))
    return stack.pop()


if __name__ == "__main__":
    for line in sys.stdin:
        print(f"{calculate(line):g}", flush=True)
