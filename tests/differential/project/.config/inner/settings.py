secret = "no"
