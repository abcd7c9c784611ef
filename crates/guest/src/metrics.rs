//! `GET /metrics`: CPU, memory and disk as the Body sees them.

use std::{fs::File, io::Read};

use serde::Serialize;

use crate::{
    reply::{self, HttpReply},
    server::GuestServer,
};

const FILE_LEN_MAX: u64 = 64 * 1024;

/// CPU time at the last request; usage is measured between two requests.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct CpuLoad {
    busy: u64,
    all: u64,
}

#[derive(Debug, Serialize)]
struct GuestMetrics {
    ts: i64,
    cpu_count: usize,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Answers with the current usage.
pub async fn answer(guest: &GuestServer) -> HttpReply {
    // On a helper thread, because the root may be a file system that hangs.
    let (disk_used, disk_total) = tokio::task::spawn_blocking(disk).await.unwrap_or_default();
    let now = load(&read("/proc/stat"));
    let before = guest.load.replace(now);
    let memory = read("/proc/meminfo");
    let (total, available) = (kib(&memory, "MemTotal:"), kib(&memory, "MemAvailable:"));
    reply::json(&GuestMetrics {
        ts: rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec,
        cpu_count: std::thread::available_parallelism().map_or(1, Into::into),
        cpu_used_pct: used_percent(before, now),
        mem_total: total,
        mem_used: total.saturating_sub(available),
        mem_cache: kib(&memory, "Cached:"),
        disk_used,
        disk_total,
    })
}

fn disk() -> (u64, u64) {
    rustix::fs::statvfs("/").map_or((0, 0), |stat| {
        let total = stat.f_blocks.saturating_mul(stat.f_frsize);
        (total.saturating_sub(stat.f_bavail.saturating_mul(stat.f_frsize)), total)
    })
}

fn load(stat: &str) -> CpuLoad {
    let times: Vec<u64> = stat
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("cpu "))
        .map(|line| line.split_whitespace().take(8).filter_map(|time| time.parse().ok()).collect())
        .unwrap_or_default();
    let all = times.iter().sum();
    let idle: u64 = times.iter().skip(3).take(2).sum();
    CpuLoad { busy: all - idle, all }
}

fn used_percent(before: CpuLoad, now: CpuLoad) -> f64 {
    let all = now.all.saturating_sub(before.all);
    let busy = now.busy.saturating_sub(before.busy);
    let basis_points = (busy * 10_000).checked_div(all).unwrap_or(0);
    f64::from(u32::try_from(basis_points).unwrap_or(10_000)) / 100.0
}

fn kib(memory: &str, name: &str) -> u64 {
    let line = memory.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.split_whitespace()
        .next()
        .and_then(|number| number.parse::<u64>().ok())
        .unwrap_or(0)
        .saturating_mul(1024)
}

fn read(path: &str) -> String {
    let mut text = String::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(FILE_LEN_MAX).read_to_string(&mut text);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_is_measured_between_two_questions() {
        let before = load("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2\n");
        assert_eq!(before, CpuLoad { busy: 200, all: 1000 });
        assert_eq!(used_percent(before, CpuLoad { busy: 450, all: 2000 }).to_string(), "25");
        assert_eq!(used_percent(before, before).to_string(), "0");
        assert_eq!(load(""), CpuLoad::default());
        assert_eq!(kib("MemTotal:  2 kB\nCached: x\n", "MemTotal:"), 2048);
    }
}
