import pathlib
import sqlite3
import sys

MIGRATIONS = pathlib.Path(__file__).parent / "migrations"


def open_database(path):
    database = sqlite3.connect(path)
    database.execute("PRAGMA foreign_keys = ON")
    return database


def migrate(database, to=None):
    (done,) = database.execute("PRAGMA user_version").fetchone()
    for file in sorted(MIGRATIONS.glob("*.sql")):
        number = int(file.name.split("_")[0])
        if number <= done or (to is not None and number > to):
            continue
        database.executescript(f"BEGIN; {file.read_text()} PRAGMA user_version = {number}; COMMIT;")


if __name__ == "__main__":
    migrate(open_database(sys.argv[1]))
