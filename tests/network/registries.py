"""Package registries as files, for the HTTPS server of `clients.py`: a crate, a Go module and a Debian package."""

import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile


def crate():
    """A crate with one constant, as `cargo package` packs it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in [
            ("Cargo.toml", '[package]\nname = "tinypkg"\nversion = "1.0.0"\nedition = "2021"\n'),
            ("src/lib.rs", 'pub const WORD: &str = "installed";\n'),
        ]:
            entry = tarfile.TarInfo(f"tinypkg-1.0.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


def write_cargo(put, name):
    """A sparse index below /cargo and its one crate."""
    packed = crate()
    put("cargo/config.json", json.dumps({"dl": f"https://{name}/cargo/crates/{{crate}}-{{version}}.crate"}).encode())
    about = {"name": "tinypkg", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False}
    put("cargo/ti/ny/tinypkg", json.dumps({**about, "cksum": hashlib.sha256(packed).hexdigest()}).encode() + b"\n")
    put("cargo/crates/tinypkg-1.0.0.crate", packed)


def write_go(put, name):
    """A module proxy below /go with one module."""
    module, version = f"{name}/tiny", "v1.0.0"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(f"{module}@{version}/go.mod", f"module {module}\n")
        archive.writestr(f"{module}@{version}/tiny.go", 'package tiny\n\nconst Word = "installed"\n')
    put(f"go/{module}/@v/list", f"{version}\n".encode())
    put(f"go/{module}/@v/{version}.info", json.dumps({"Version": version, "Time": "2020-01-01T00:00:00Z"}).encode())
    put(f"go/{module}/@v/{version}.mod", f"module {module}\n".encode())
    put(f"go/{module}/@v/{version}.zip", out.getvalue())


def write_apt(put, root):
    """A flat repository below /apt with one package."""
    tree = os.path.join(root, "deb")
    os.makedirs(f"{tree}/DEBIAN")
    os.makedirs(f"{tree}/usr/share/tinypkg")
    with open(f"{tree}/usr/share/tinypkg/word", "w") as file:
        file.write("installed\n")
    control = "Package: tinypkg\nVersion: 1.0\nArchitecture: all\nMaintainer: w <w@w>\nDescription: tiny\n"
    with open(f"{tree}/DEBIAN/control", "w") as file:
        file.write(control)
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, f"{tree}.deb"], check=True, stdout=subprocess.DEVNULL)
    with open(f"{tree}.deb", "rb") as file:
        package = file.read()
    put("apt/tinypkg.deb", package)
    about = f"{control}Filename: ./tinypkg.deb\nSize: {len(package)}\nSHA256: {hashlib.sha256(package).hexdigest()}\n"
    put("apt/Packages", about.encode())
    digest = f" {hashlib.sha256(about.encode()).hexdigest()} {len(about)} Packages\n"
    put("apt/Release", f"Suite: tiny\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n{digest}".encode())
