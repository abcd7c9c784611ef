SETTINGS = {"port": 80, "host": "legacy.invalid", "debug": False}
