//! On which processors a Body is made.
//!
//! Maker, launcher, first process and the network's maker have two processors' worth of work for a millisecond or two.
//! The scheduler moves nobody in so short a time: it was seen to leave one of them behind another on a busy processor
//! while the next one idled, and to wake the maker where the first process was at work. So the maker stays where it is, the
//! network's maker with it, the launcher and the first process stay off that processor, and all this ends before the guest
//! begins.
//!
//! Whoever forks places whom it forked: who has not run yet is moved for nothing.

use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
};

/// Who works where. Does nothing where the kernel refuses: it only saves time.
#[derive(Debug, Clone, Copy)]
pub struct Places {
    all: CpuSet,
    maker: usize,
}

impl Places {
    /// For a maker that calls this; none if there is no choice.
    pub fn here() -> Option<Self> {
        let (all, maker) = (sched_getaffinity(None).ok()?, sched_getcpu());
        (maker < CpuSet::MAX_CPU && all.is_set(maker) && all.count() > 1).then_some(Self { all, maker })
    }

    /// That process, and whom it forks, leave the maker's processor alone.
    pub fn apart(&self, who: Pid) {
        let mut others = self.all;
        others.unset(self.maker);
        let _ = sched_setaffinity(Some(who), &others);
    }

    /// Where the maker works, which soon waits.
    pub fn makers(&self) -> CpuSet {
        let mut there = CpuSet::new();
        there.set(self.maker);
        there
    }

    /// That process works there, whenever the maker does not.
    pub fn beside_maker(&self, who: Pid) {
        let _ = sys::process::wait_for_turns(who);
        let _ = sched_setaffinity(Some(who), &self.makers());
    }

    /// The caller works wherever the maker may.
    pub fn anywhere(&self) {
        let _ = sched_setaffinity(None, &self.all);
    }
}
