//! The answers to calls that change files, by their keys.
//!
//! Invariant: a key is carried out once. A second call with it waits for the first and gets its answer.
//! Invariant: at most [`LEDGER_MAX`] answers are kept, the newest, and at most [`RUNNING_MAX`] calls run or wait.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    rc::Rc,
};

use hyper::StatusCode;
use proto::file_call::{FileAnswer, FileOperation, KEY_LEN_MAX, LEDGER_MAX};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::reply::PlainRefusal;

/// The most calls with a key at once.
const RUNNING_MAX: usize = 64;

/// The outcome of a call: its answer, or why it was not carried out.
pub type CallOutcome = Result<FileAnswer, PlainRefusal>;

/// The calls with a key.
#[derive(Debug, Default)]
pub struct CallLedger {
    calls: RefCell<HashMap<String, Rc<LedgerEntry>>>,
    /// The keys of the answers, oldest first.
    answered: RefCell<VecDeque<String>>,
}

#[derive(Debug)]
struct LedgerEntry {
    /// The digest of the operation.
    operation: [u8; 32],
    outcome: watch::Sender<Option<CallOutcome>>,
}

/// Whether a call with a key is new.
#[derive(Debug)]
pub enum Admission {
    /// It is new and must be carried out.
    New,
    /// It has been carried out before, or is being carried out.
    Known(OutcomeReceiver),
}

/// Receives the outcome of a call.
pub type OutcomeReceiver = watch::Receiver<Option<CallOutcome>>;

impl CallLedger {
    /// Registers a call.
    pub fn admit(&self, key: &str, operation: &FileOperation) -> Result<Admission, PlainRefusal> {
        if key.is_empty() || key.len() > KEY_LEN_MAX {
            return Err(PlainRefusal::bad(format!("a key has 1 to {KEY_LEN_MAX} bytes")));
        }
        let operation = digest(operation)?;
        let mut calls = self.calls.borrow_mut();
        if let Some(known) = calls.get(key) {
            if known.operation != operation {
                let message = "the key belongs to another operation";
                return Err(PlainRefusal::new(StatusCode::CONFLICT, message));
            }
            return Ok(Admission::Known(known.outcome.subscribe()));
        }
        if calls.len() - self.answered.borrow().len() >= RUNNING_MAX {
            let message = format!("{RUNNING_MAX} operations on files are running already");
            return Err(PlainRefusal::new(StatusCode::SERVICE_UNAVAILABLE, message));
        }
        calls.insert(key.to_owned(), Rc::new(LedgerEntry { operation, outcome: watch::Sender::new(None) }));
        Ok(Admission::New)
    }

    /// Finds a call by its key.
    pub fn find(&self, key: &str) -> Option<OutcomeReceiver> {
        self.calls.borrow().get(key).map(|call| call.outcome.subscribe())
    }

    /// Notes the outcome of a call. A call that was not carried out is forgotten, so that it can be repeated.
    pub fn settle(&self, key: &str, outcome: CallOutcome) {
        let mut calls = self.calls.borrow_mut();
        let Some(call) = calls.get(key).cloned() else { return };
        if outcome.is_ok() {
            let mut answered = self.answered.borrow_mut();
            answered.push_back(key.to_owned());
            while answered.len() > LEDGER_MAX {
                answered.pop_front().into_iter().for_each(|oldest| drop(calls.remove(&oldest)));
            }
        } else {
            calls.remove(key);
        }
        call.outcome.send_replace(Some(outcome));
    }
}

/// Waits for the outcome of a call.
pub async fn await_outcome(mut call: OutcomeReceiver) -> CallOutcome {
    let settled = call.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone());
    settled.unwrap_or_else(|| Err(PlainRefusal::internal("the operation was abandoned")))
}

fn digest(operation: &FileOperation) -> Result<[u8; 32], PlainRefusal> {
    let text = serde_json::to_vec(operation).map_err(|error| PlainRefusal::internal(error.to_string()))?;
    Ok(Sha256::digest(&text).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delete(path: &str) -> FileOperation {
        FileOperation::Delete { path: path.to_owned() }
    }

    #[tokio::test]
    async fn a_key_is_carried_out_once_and_answered_often() {
        let ledger = CallLedger::default();
        assert!(matches!(ledger.admit("k", &delete("/a")), Ok(Admission::New)));
        let Ok(Admission::Known(second)) = ledger.admit("k", &delete("/a")) else {
            panic!("it is new again")
        };
        assert_eq!(ledger.admit("k", &delete("/b")).unwrap_err().status, StatusCode::CONFLICT);
        let settle = async { ledger.settle("k", Ok(FileAnswer::Deleted)) };
        let (answer, ()) = tokio::join!(await_outcome(second), settle);
        assert_eq!(answer, Ok(FileAnswer::Deleted));
        let recalled = ledger.find("k").unwrap();
        assert_eq!(await_outcome(recalled).await, Ok(FileAnswer::Deleted));
        assert!(ledger.find("other").is_none());
    }

    #[tokio::test]
    async fn a_call_that_was_not_carried_out_can_be_repeated() {
        let ledger = CallLedger::default();
        assert!(matches!(ledger.admit("k", &delete("/a")), Ok(Admission::New)));
        ledger.settle("k", Err(PlainRefusal::internal("no thread")));
        assert!(matches!(ledger.admit("k", &delete("/a")), Ok(Admission::New)));
    }

    #[test]
    fn the_newest_answers_are_kept_and_running_calls_have_a_limit() {
        let ledger = CallLedger::default();
        for n in 0..LEDGER_MAX + 3 {
            assert!(matches!(ledger.admit(&n.to_string(), &delete("/a")), Ok(Admission::New)));
            ledger.settle(&n.to_string(), Ok(FileAnswer::Deleted));
        }
        assert!(ledger.find("2").is_none() && ledger.find("3").is_some());
        assert_eq!(ledger.calls.borrow().len(), LEDGER_MAX);
        for n in 0..RUNNING_MAX {
            assert!(matches!(ledger.admit(&format!("r{n}"), &delete("/a")), Ok(Admission::New)));
        }
        let refused = ledger.admit("one more", &delete("/a")).unwrap_err();
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        for bad in ["", &"x".repeat(KEY_LEN_MAX + 1)] {
            assert_eq!(ledger.admit(bad, &delete("/a")).unwrap_err().status, StatusCode::BAD_REQUEST);
        }
    }
}
