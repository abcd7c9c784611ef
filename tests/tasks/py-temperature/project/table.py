def print_table(rows):
    return "\n".join(" ".join(str(cell) for cell in row) for row in rows)
