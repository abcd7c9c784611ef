//! The registry of terminals: finds a requested terminal or starts it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex as Plain, MutexGuard, PoisonError},
};

use fleet::{ExecRequest, TtySize};
use proto::{BodyId, Failure, Kind};
use tokio::sync::{Mutex, oneshot};

use super::{
    actor::{TerminalActor, TerminalOrder, TerminalOrders},
    tag,
    viewer::{ViewerRight, ViewerSeat},
};
use crate::App;

/// How many times to retry when a terminal ends at this very moment.
const TRIES: usize = 3;

type TerminalKey = (BodyId, String);
type TerminalSlot = Arc<Mutex<Option<TerminalOrders>>>;

/// All terminals that this server follows.
#[derive(Debug, Clone, Default)]
pub struct Terminals(Arc<Plain<HashMap<TerminalKey, TerminalSlot>>>);

/// A request for a terminal.
#[derive(Debug, Clone)]
pub struct TerminalRequest {
    /// The Body.
    pub body: BodyId,
    /// The name of the terminal.
    pub name: String,
    /// The rights of the viewer.
    pub right: ViewerRight,
    /// The size; none keeps the size of a running terminal.
    pub size: Option<TtySize>,
    /// The command to start if the terminal does not run.
    pub command: ExecRequest,
}

impl Terminals {
    /// The number of terminals.
    pub fn count(&self) -> usize {
        self.slots().len()
    }

    /// Joins a terminal, and starts it if it does not run and the caller may type.
    pub async fn join(
        &self,
        app: &App,
        asked: &TerminalRequest,
    ) -> Result<(ViewerSeat, TerminalOrders), Failure> {
        for _ in 0..TRIES {
            let orders = self.find_or_make(app, asked).await?;
            let size = asked.size.filter(|_| asked.right == ViewerRight::Type);
            let (answer, seat) = oneshot::channel();
            if orders.send(TerminalOrder::Join(asked.right, size, answer)).await.is_err() {
                continue;
            }
            match seat.await {
                Ok(Some(seat)) => {
                    if let Some(size) = size {
                        seat.control.0.resize(size).await?;
                    }
                    return Ok((seat, orders));
                }
                Ok(None) => {
                    return Err(Failure::new(Kind::Limit, "this terminal has too many viewers")
                        .hint("close one that you no longer need"));
                }
                Err(_) => continue,
            }
        }
        Err(Failure::new(Kind::Conflict, format!("terminal {:?} has just ended", asked.name))
            .hint("connect again to begin a new one"))
    }

    async fn find_or_make(&self, app: &App, asked: &TerminalRequest) -> Result<TerminalOrders, Failure> {
        let key = (asked.body.clone(), asked.name.clone());
        let slot = self.slots().entry(key.clone()).or_default().clone();
        // Two requests for the same terminal at the same time get the same one.
        let mut held = slot.lock().await;
        if let Some(orders) = held.as_ref().filter(|orders| !orders.is_closed()) {
            return Ok(orders.clone());
        }
        let begun = self.begin(app, asked).await;
        match begun {
            Ok(orders) => {
                *held = Some(orders.clone());
                Ok(orders)
            }
            Err(failure) => {
                drop(held);
                drop(slot);
                self.forget(&key);
                Err(failure)
            }
        }
    }

    /// Starts the task of a terminal; returns when its command was found or has started.
    async fn begin(&self, app: &App, asked: &TerminalRequest) -> Result<TerminalOrders, Failure> {
        let (told, answer) = oneshot::channel();
        let (app, terminals, asked) = (app.clone(), self.clone(), asked.clone());
        tokio::spawn(async move {
            let fleet = app.fleet();
            let tag = tag(&asked.name);
            let found = match fleet.execs().attach(&asked.body, &tag).await {
                Ok(Some(exec)) => Ok(exec),
                Ok(None) if asked.right == ViewerRight::Watch => Err(Failure::new(
                    Kind::NotFound,
                    format!("Body {} has no terminal {:?}", asked.body, asked.name),
                )
                .hint("connect without `mode=watch` to begin one")),
                Ok(None) => {
                    let command = ExecRequest { tag: Some(tag), ..asked.command.clone() };
                    fleet.execs().start(&asked.body, command).await.map_err(Failure::from)
                }
                Err(failure) => Err(failure),
            };
            match found {
                Ok(exec) => {
                    let size = asked.size.or(asked.command.tty).unwrap_or(TtySize { cols: 80, rows: 24 });
                    let (actor, orders) = TerminalActor::new(size);
                    let _ = told.send(Ok(orders));
                    actor.run(exec).await;
                    terminals.forget(&(asked.body, asked.name));
                }
                Err(failure) => drop(told.send(Err(failure))),
            }
        });
        answer.await.unwrap_or_else(|_| {
            Err(Failure::new(Kind::Internal, "the task of the terminal ended unexpectedly"))
        })
    }

    /// Drops the slot of a terminal that has ended, unless a request is using it.
    fn forget(&self, key: &TerminalKey) {
        let mut slots = self.slots();
        let unused = |slot: &TerminalSlot| {
            Arc::strong_count(slot) == 1
                && slot.try_lock().is_ok_and(|held| held.as_ref().is_none_or(TerminalOrders::is_closed))
        };
        if slots.get(key).is_some_and(unused) {
            slots.remove(key);
        }
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<TerminalKey, TerminalSlot>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
