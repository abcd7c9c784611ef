//! Memory of processes as PSS, which divides shared pages among their users.

use std::{fs, io};

/// Proportional set size of one process, in bytes.
pub fn pss(pid: i32) -> io::Result<u64> {
    sum(pid, &["Pss:"])
}

/// Memory that no other process shares, in bytes.
pub fn private(pid: i32) -> io::Result<u64> {
    sum(pid, &["Private_Clean:", "Private_Dirty:"])
}

fn sum(pid: i32, names: &[&str]) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let lines = text.lines().filter(|line| names.iter().any(|name| line.starts_with(name)));
    Ok(lines.filter_map(|line| line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>() * 1024)
}

/// PSS of a process and all of its descendants.
pub fn pss_of_family(root: i32) -> io::Result<u64> {
    family(root)?.into_iter().map(pss).sum()
}

/// Private memory of a process and all of its descendants.
pub fn private_of_family(root: i32) -> io::Result<u64> {
    family(root)?.into_iter().map(private).sum()
}

/// A process and all of its descendants.
pub fn family(root: i32) -> io::Result<Vec<i32>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) {
            parents.extend(parent(pid).map(|parent| (pid, parent)));
        }
    }
    let mut found = vec![root];
    let mut at = 0;
    while let Some(above) = found.get(at).copied() {
        found.extend(parents.iter().filter(|(_, parent)| *parent == above).map(|(pid, _)| *pid));
        at += 1;
    }
    Ok(found)
}

/// The parent of a process.
pub fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Memory of the kernel itself, in bytes.
pub fn of_the_kernel() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let ours = ["Slab:", "KernelStack:", "PageTables:", "Percpu:"];
    let lines = text.lines().filter(|line| ours.iter().any(|name| line.starts_with(name)));
    lines.filter_map(|line| line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>() * 1024
}
