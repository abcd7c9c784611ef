import sys

from table import read_rows


def totals(path):
    sums = {}
    for row in read_rows(path):
        name = row["customer"]
        sums[name] = sums.get(name, 0) + int(row["amount"])
    return sums


if __name__ == "__main__":
    for name, total in totals(sys.argv[1]).items():
        print(f"{name}: {total}")
