def discount_cents(basket):
    return basket.sum() // 10 if basket.sum() > 10_000 else 0
