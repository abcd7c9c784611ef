//! Connections whose rule says `ask`: they wait until a change of the policy allows or denies their target.
//!
//! The question is a line of the spool, which any `pal` shows; the answer is an ordinary change of the policy.
//!
//! Invariant: a connection that waits has sent no byte to a host, and one that is not answered in time is denied.

use std::{cell::RefCell, collections::HashMap, time::Duration};

use proto::egress::{NO_ANSWER, Permit};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use crate::{flows::OpenFlow, proxy::Proxy, target::Target};

/// How long a connection waits. Most programs wait this long for a server.
const ANSWER_WAIT: Duration = Duration::from_secs(120);
/// Connections that wait at once, so that others find a turn.
const WAITING_MAX: usize = 64;

/// The connections that wait.
#[derive(Debug, Default)]
pub struct Questions {
    changed: Notify,
    /// How many connections wait for each target.
    waiting: RefCell<HashMap<String, usize>>,
}

/// A connection that waits; it no longer does when this is dropped.
struct WaitingConnection<'a> {
    questions: &'a Questions,
    to: String,
}

impl Questions {
    /// Lets the connections that wait look at the policy again.
    pub fn policy_changed(&self) {
        self.changed.notify_waiters();
    }

    /// Adds a connection, and returns whether it is the first one to its target; none if too many wait.
    fn add(&self, to: &str) -> Option<(WaitingConnection<'_>, bool)> {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.values().sum::<usize>() >= WAITING_MAX {
            return None;
        }
        let count = waiting.entry(to.to_owned()).or_default();
        *count += 1;
        Some((WaitingConnection { questions: self, to: to.to_owned() }, *count == 1))
    }
}

impl Drop for WaitingConnection<'_> {
    fn drop(&mut self) {
        let mut waiting = self.questions.waiting.borrow_mut();
        if let Some(count) = waiting.get_mut(&self.to) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.to);
            }
        }
    }
}

impl Proxy {
    /// Waits for a decision about a target that no rule allows, if a rule asks for one. `why` is the reason without it.
    pub async fn ask(&self, target: &Target, why: String) -> Result<(Permit, OpenFlow), String> {
        let rule = target.asking(&self.policy.borrow());
        let Some(rule) = rule else { return Err(why) };
        let to = target.to_string();
        let Some((_waiting, is_first)) = self.questions.add(&to) else {
            return Err(format!("{NO_ANSWER} `{rule}`: too many connections wait for one"));
        };
        if is_first {
            let recorded = self.journal.borrow_mut().record_question(&to, &rule);
            recorded.map_err(|error| format!("the question about it cannot be recorded: {error}"))?;
        }
        let deadline = Instant::now() + ANSWER_WAIT;
        loop {
            let changed = self.questions.changed.notified();
            match self.open(target) {
                Ok(opened) => return Ok(opened),
                Err(why) if target.asking(&self.policy.borrow()).is_none() => return Err(why),
                Err(_) => {}
            }
            if timeout_at(deadline, changed).await.is_err() {
                return Err(format!("{NO_ANSWER} `{rule}`"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use proto::egress::{DecisionKind, EgressRule, Flush, Policy};

    use super::*;
    use crate::{
        journal::{
            Journal,
            tests::{lines, spool},
        },
        names::NameTable,
        target::Host,
    };

    fn policy(more: &[EgressRule]) -> Policy {
        Policy::new(&[&[EgressRule::ask("*:*")], more].concat()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_waits_for_a_change_of_the_policy() {
        let file = spool();
        let journal = Journal::new(file.try_clone().unwrap(), Flush::Kernel);
        let proxy = Rc::new(Proxy::new(policy(&[]), 1, journal, NameTable::default()));
        let target = |name: &str| Target { host: Host::Name(name.into()), port: 443 };
        let (good, bad, late) = (target("good.test"), target("bad.test"), target("late.test"));
        let answers = async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!(proxy.questions.waiting.borrow().values().sum::<usize>(), 4);
            *proxy.policy.borrow_mut() =
                policy(&[EgressRule::allow("good.test"), EgressRule::deny("bad.test")]);
            proxy.questions.policy_changed();
        };
        let no = || "no".to_owned();
        let (one, two, denied, unanswered, ()) = tokio::join!(
            proxy.ask(&good, no()),
            proxy.ask(&good, no()),
            proxy.ask(&bad, no()),
            proxy.ask(&late, no()),
            answers
        );
        assert!(one.is_ok() && two.is_ok());
        assert!(denied.err().unwrap().contains("denies bad.test:443"));
        assert_eq!(unanswered.err().unwrap(), "no answer came in time to the rule `ask *:*`");
        assert!(proxy.questions.waiting.borrow().is_empty());
        let asked: Vec<String> = lines(&file)
            .into_iter()
            .filter(|line| line.kind == DecisionKind::Asked)
            .map(|line| line.data.to)
            .collect();
        assert_eq!(asked, ["good.test:443", "bad.test:443", "late.test:443"], "one question for each target");
    }
}
