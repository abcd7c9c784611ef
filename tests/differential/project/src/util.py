def greet(name):
    return f"hello {name}"


def leave(name):
    return f"hello again {name}"
