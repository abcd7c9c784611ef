NAME = "json"
