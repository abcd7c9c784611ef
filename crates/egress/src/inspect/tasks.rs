//! The tasks of one inspected connection: they end with it.

use std::{cell::RefCell, future::Future, rc::Rc};

use hyper::rt::Executor;
use tokio::task::JoinSet;

/// Starts tasks on the thread of the connection.
#[derive(Clone, Default)]
pub struct ConnectionTasks(Rc<RefCell<JoinSet<()>>>);

/// Ends the tasks of a connection when it is dropped.
pub struct TasksGuard(ConnectionTasks);

impl ConnectionTasks {
    /// Tasks that end when the guard is dropped.
    pub fn guarded() -> (Self, TasksGuard) {
        let tasks = Self::default();
        (tasks.clone(), TasksGuard(tasks))
    }

    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let mut tasks = self.0.borrow_mut();
        while tasks.try_join_next().is_some() {}
        tasks.spawn_local(task);
    }
}

impl<F: Future + 'static> Executor<F> for ConnectionTasks {
    fn execute(&self, task: F) {
        self.spawn(async move {
            task.await;
        });
    }
}

impl Drop for TasksGuard {
    fn drop(&mut self) {
        self.0.0.borrow_mut().abort_all();
    }
}
