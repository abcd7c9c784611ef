class Basket:
    def __init__(self):
        self.prices = []

    def add(self, cents):
        self.prices.append(cents)

    def sum(self):
        return sum(self.prices)
