import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parent / "plugins"


def load_all(root=ROOT):
    names, failed = {}, []
    for file in sorted(root.rglob("*.py")):
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        names[module.NAME] = str(file.relative_to(root))
    return names, failed
