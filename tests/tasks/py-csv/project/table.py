def read_rows(path):
    with open(path) as file:
        names = file.readline().rstrip("\n").split(",")
        for line in file:
            yield dict(zip(names, line.rstrip("\n").split(",")))
