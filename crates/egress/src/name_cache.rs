//! Keeps the addresses of names for a while: a package manager opens hundreds of connections to one name, and a
//! lookup for each would cost more than the downloads.
//!
//! Invariant: one lookup of a name runs at a time; further connections to the name wait for its answer.
//! Invariant: at most [`NAMES_MAX`] names are kept, each for at most [`KEPT_MAX`], and a failure for less.

use std::{
    cell::RefCell,
    collections::HashMap,
    io,
    net::IpAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use crate::resolve::ResolvedName;

/// Most names that are kept.
const NAMES_MAX: usize = 1024;
/// How long addresses are kept, whatever the name server says.
const KEPT_MIN: Duration = Duration::from_secs(10);
const KEPT_MAX: Duration = Duration::from_secs(300);
/// How long a failure is kept: long enough for a burst of connections, short enough for a network that comes back.
const FAILURE_KEPT: Duration = Duration::from_secs(5);

/// The answers about names, of one egress process.
#[derive(Default)]
pub struct NameCache {
    names: RefCell<HashMap<String, Rc<Mutex<Option<KeptAnswer>>>>>,
}

struct KeptAnswer {
    until: Instant,
    answer: Result<Vec<IpAddr>, (io::ErrorKind, String)>,
}

impl NameCache {
    /// The addresses of a name: those that are kept, else those that `lookup` finds.
    pub async fn resolve<F>(&self, name: &str, lookup: impl FnOnce() -> F) -> io::Result<Vec<IpAddr>>
    where
        F: Future<Output = io::Result<ResolvedName>>,
    {
        let entry = self.entry(name);
        let mut kept = entry.lock().await;
        let now = Instant::now();
        let answer = match kept.take().filter(|kept| kept.until > now) {
            Some(known) => known,
            None => KeptAnswer::new(lookup().await),
        };
        kept.insert(answer).answer.clone().map_err(|(kind, text)| io::Error::new(kind, text))
    }

    fn entry(&self, name: &str) -> Rc<Mutex<Option<KeptAnswer>>> {
        let mut names = self.names.borrow_mut();
        if names.len() >= NAMES_MAX && !names.contains_key(name) {
            names.clear();
        }
        names.entry(name.to_owned()).or_default().clone()
    }
}

impl KeptAnswer {
    fn new(found: io::Result<ResolvedName>) -> Self {
        let kept = match &found {
            Ok(resolved) => resolved.ttl.clamp(KEPT_MIN, KEPT_MAX),
            Err(_) => FAILURE_KEPT,
        };
        let answer =
            found.map(|resolved| resolved.addresses).map_err(|error| (error.kind(), error.to_string()));
        Self { until: Instant::now() + kept, answer }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn found() -> io::Result<ResolvedName> {
        Ok(ResolvedName { addresses: vec![[192, 0, 2, 1].into()], ttl: Duration::ZERO })
    }

    #[tokio::test]
    async fn connections_of_one_name_share_one_lookup() {
        let (cache, lookups) = (NameCache::default(), Cell::new(0));
        let ask = || {
            cache.resolve("a.test", || async {
                lookups.set(lookups.get() + 1);
                tokio::task::yield_now().await;
                found()
            })
        };
        let (one, two) = tokio::join!(ask(), ask());
        assert_eq!((one.unwrap(), two.unwrap()), (vec![[192, 0, 2, 1].into()], vec![[192, 0, 2, 1].into()]));
        ask().await.unwrap();
        assert_eq!(lookups.get(), 1);
        cache.resolve("b.test", || async { found() }).await.unwrap();
        assert_eq!(cache.names.borrow().len(), 2, "each name has an answer of its own");
    }

    #[tokio::test]
    async fn a_failure_is_kept_and_an_old_answer_is_not() {
        let cache = NameCache::default();
        let missing = || async { Err(io::Error::new(io::ErrorKind::NotFound, "the name does not exist")) };
        assert_eq!(cache.resolve("a.test", missing).await.unwrap_err().kind(), io::ErrorKind::NotFound);
        let again = cache.resolve("a.test", || async { found() }).await.unwrap_err();
        assert_eq!(
            (again.kind(), again.to_string().as_str()),
            (io::ErrorKind::NotFound, "the name does not exist")
        );
        let entry = cache.entry("a.test");
        entry.lock().await.as_mut().unwrap().until = Instant::now();
        assert!(cache.resolve("a.test", || async { found() }).await.is_ok());
        for number in 0..2 * NAMES_MAX {
            cache.resolve(&format!("{number}.test"), || async { found() }).await.unwrap();
        }
        assert!(cache.names.borrow().len() <= NAMES_MAX);
    }
}
