from shop.basket import Basket


def print_bill(basket: Basket) -> str:
    lines = [f"{cents / 100:.2f}" for cents in basket.prices]
    return "\n".join([*lines, f"total {basket.sum() / 100:.2f}"])
