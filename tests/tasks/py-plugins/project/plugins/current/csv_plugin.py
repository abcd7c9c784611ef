NAME = "csv"
