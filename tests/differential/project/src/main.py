import util


def main():
    # TODO: greet by name
    print(util.greet("world"))


if __name__ == "__main__":
    main()
