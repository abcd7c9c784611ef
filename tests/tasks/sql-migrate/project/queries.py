def late_orders(database, day):
    return [row[0] for row in database.execute("SELECT id FROM orders")]
