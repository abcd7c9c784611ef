//! An OCI bundle with the host's `/usr`, read-only, for peers that need one.

use std::{fs, io, os::unix::fs::symlink, path::PathBuf};

use serde_json::json;

use crate::context::BenchContext;

/// A root directory with nothing but mount points.
pub fn rootfs(context: &BenchContext) -> io::Result<PathBuf> {
    let root = context.dir("rootfs")?;
    for dir in ["usr", "proc", "sys", "dev", "tmp", "etc", "run", "root", "var"] {
        fs::create_dir_all(root.join(dir))?;
    }
    fs::write(root.join("etc/os-release"), "ID=bench\n")?;
    for name in ["bin", "sbin", "lib", "lib64"] {
        match symlink(format!("usr/{name}"), root.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(root)
}

/// A bundle that runs one command with the namespaces and limits of a Body.
pub fn bundle(context: &BenchContext, name: &str, command: &[&str]) -> io::Result<PathBuf> {
    let root = rootfs(context)?;
    let dir = context.dir(&format!("bundle-{name}"))?;
    let namespaces: Vec<_> = ["pid", "mount", "ipc", "uts", "network", "cgroup"]
        .iter()
        .map(|kind| json!({ "type": kind }))
        .collect();
    let tmpfs =
        |at: &str| json!({ "destination": at, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"] });
    let config = json!({
        "ociVersion": "1.0.2",
        "hostname": "bench",
        "root": { "path": root, "readonly": true },
        "process": {
            "terminal": false, "user": { "uid": 0, "gid": 0 }, "args": command, "cwd": "/",
            "env": ["PATH=/usr/bin:/bin"], "noNewPrivileges": true,
        },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            tmpfs("/dev"), tmpfs("/tmp"),
            { "destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"] },
        ],
        "linux": {
            "namespaces": namespaces,
            "resources": { "memory": { "limit": 1u64 << 30 }, "pids": { "limit": 512 } },
        },
    });
    fs::write(dir.join("config.json"), serde_json::to_vec(&config)?)?;
    Ok(dir)
}
