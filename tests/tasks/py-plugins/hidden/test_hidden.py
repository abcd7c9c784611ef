import pathlib
import tempfile
import unittest

from loader import load_all


class Hidden(unittest.TestCase):
    def test_current(self):
        names, failed = load_all()
        self.assertEqual(names, {"csv": "current/csv_plugin.py", "json": "current/json_plugin.py"})
        self.assertEqual(failed, [])
        self.assertFalse(pathlib.Path("plugins/old").exists())

    def test_failures(self):
        with tempfile.TemporaryDirectory() as scratch:
            root = pathlib.Path(scratch)
            (root / "a.py").write_text("import no_such_module_here")
            (root / "b.py").write_text("NAME = 'b'")
            (root / "c.py").write_text("def (:")
            (root / "d.py").write_text("OTHER = 1")
            names, failed = load_all(root)
        self.assertEqual(names, {"b": "b.py"})
        self.assertEqual([name for name, _ in failed], ["a.py", "c.py", "d.py"])
        self.assertIn("no_such_module_here", str(failed[0][1]))


if __name__ == "__main__":
    unittest.main()
