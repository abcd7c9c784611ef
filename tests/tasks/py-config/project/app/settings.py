import json
import os

DEFAULTS = {"port": 8080, "host": "localhost", "debug": False}


def load(environ=os.environ):
    try:
        from app.legacy import SETTINGS
        return dict(SETTINGS)
    except ImportError:
        pass
    settings = dict(DEFAULTS)
    for name in settings:
        if "APP_" + name.upper() in environ:
            settings[name] = environ["APP_" + name.upper()]
    if "APP_CONFIG" in environ:
        with open(environ["APP_CONFIG"]) as file:
            settings.update(json.load(file))
    return settings
