//! The connections of a Body that are open, so that a change of its policy can close some of them.

use std::{cell::RefCell, collections::HashMap, rc::Rc};

use proto::egress::{Permit, Policy};
use tokio::sync::Notify;

use crate::target::Target;

/// The open connections.
#[derive(Default)]
pub struct FlowTable {
    open: RefCell<HashMap<u64, Flow>>,
    last: std::cell::Cell<u64>,
}

struct Flow {
    target: Target,
    permit: Permit,
    closed: Rc<Notify>,
}

/// A connection in the table; it leaves the table when this is dropped.
pub struct OpenFlow {
    table: Rc<FlowTable>,
    nr: u64,
    closed: Rc<Notify>,
}

impl FlowTable {
    /// Adds a connection.
    pub fn add(self: &Rc<Self>, target: Target, permit: Permit) -> OpenFlow {
        let nr = self.last.get() + 1;
        self.last.set(nr);
        let closed = Rc::new(Notify::new());
        self.open.borrow_mut().insert(nr, Flow { target, permit, closed: closed.clone() });
        OpenFlow { table: self.clone(), nr, closed }
    }

    /// Closes the connections that share a budget which is spent. Where requests are judged, each ends by itself.
    pub fn close_spent(&self, key: &str) {
        self.open.borrow_mut().retain(|_, flow| {
            let own = flow.permit.terms.budget.as_ref().filter(|_| !flow.permit.inspect);
            let is_spent = own.is_some_and(|budget| budget.key == key);
            if is_spent {
                flow.closed.notify_one();
            }
            !is_spent
        });
    }

    /// The number of connections.
    pub fn len(&self) -> usize {
        self.open.borrow().len()
    }

    /// Closes the connections that a policy does not permit as they were permitted, and returns their number.
    pub fn close_denied(&self, policy: &Policy) -> usize {
        let mut open = self.open.borrow_mut();
        let before = open.len();
        open.retain(|_, flow| {
            let keeps = flow.target.judge(policy).is_ok_and(|permit| {
                permit.protocol == flow.permit.protocol
                    && permit.inspect == flow.permit.inspect
                    && (permit.private || !flow.permit.private)
                    && (permit.inspect || permit.terms.budget == flow.permit.terms.budget)
            });
            if !keeps {
                flow.closed.notify_one();
            }
            keeps
        });
        before - open.len()
    }
}

impl OpenFlow {
    /// Waits until the connection must be closed.
    pub async fn closed(&self) {
        self.closed.notified().await;
    }
}

impl Drop for OpenFlow {
    fn drop(&mut self) {
        self.table.open.borrow_mut().remove(&self.nr);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::target::Host;

    #[tokio::test]
    async fn a_change_closes_what_it_no_longer_permits_and_nothing_else() {
        let table = Rc::new(FlowTable::default());
        let rules = |rules: &[&str]| Policy::parse(rules).unwrap();
        let before = rules(&["a.test:1-9+private", "b.test:1", "192.0.2.0/24:1"]);
        let add = |host: Host, port| {
            let target = Target { host, port };
            let permit = target.judge(&before).unwrap();
            table.add(target, permit)
        };
        let name = |name: &str| Host::Name(name.into());
        let kept = [add(name("a.test"), 1), add(Host::Address([192, 0, 2, 7].into()), 1)];
        let ended = [add(name("a.test"), 2), add(name("b.test"), 1), add(name("a.test"), 3)];
        assert_eq!((table.len(), table.close_denied(&before)), (5, 0));
        let after = rules(&["a.test:1+private", "192.0.2.7:1", "b.test:1+tls", "a.test:3"]);
        assert_eq!((table.close_denied(&after), table.len()), (3, 2));
        for flow in &ended {
            timeout(Duration::from_secs(5), flow.closed()).await.unwrap();
        }
        for flow in &kept {
            assert!(timeout(Duration::ZERO, flow.closed()).await.is_err());
        }
        drop((kept, ended));
        assert_eq!(table.len(), 0);
    }
}
