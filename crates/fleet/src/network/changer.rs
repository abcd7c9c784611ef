//! Shows and changes the policies of existing Bodies.
//!
//! Invariant: the log has a policy before the egress process gets it; the spec and the orders on the disk have it
//! before a connection is judged by it.

use body::{BodyDir, ProcessState, egress::EgressDir};
use proto::{
    BodyId, Failure, Kind, Spec,
    egress::{EgressControl, EgressOrders, EgressReply, EgressRule, fit_to_show},
    event_data::NetworkChanged,
    spec::{Egress, SecretGrant},
};
use serde::Serialize;

use super::request::{check, check_accept};
use crate::{Fleet, blocking::run_blocking, create::check_env, failures};

/// When a policy counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyForce {
    /// It counts now.
    Now,
    /// It counts from the Body's next start on.
    AtNextStart,
    /// The Body's egress process does not answer: it counts as soon as the process runs again.
    AtRestart,
}

/// The policy of a Body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NetworkState {
    /// The Body.
    pub id: BodyId,
    /// Whether the Body has a policy; without one it reaches only its own loopback.
    pub policy: bool,
    /// The rules.
    pub rules: Vec<EgressRule>,
    /// The secrets that the Body may use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<GrantedSecret>,
    /// Other Bodies that may connect, each as `BODY:PORTS`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub accept: Vec<String>,
    /// The ceiling of the key that owns the Body, if it has one: rules that must allow each connection, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<Vec<EgressRule>>,
    /// The number of the policy.
    pub generation: u64,
    /// When it counts.
    pub in_force: PolicyForce,
    /// The open connections, if its egress process runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open: Option<usize>,
    /// The connections that a change closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub closed: Option<usize>,
}

/// A secret that a Body may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GrantedSecret {
    /// Its name.
    pub name: String,
    /// The text that stands for it in the Body.
    pub placeholder: String,
    /// The hosts to which it may go; none if the secret was removed.
    pub hosts: Vec<String>,
}

/// A change of a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyChange {
    /// Add rules, in front of the others. A rule takes the place of one about the same target.
    Add(PolicyPart),
    /// Replace all rules.
    Replace(PolicyPart),
    /// No longer accept these Bodies, each as `BODY:PORTS` in the words of the policy.
    Reject(Vec<String>),
}

/// Rules of a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyPart {
    /// Rules about targets.
    pub rules: Vec<EgressRule>,
    /// Other Bodies that may connect, each as `BODY:PORTS`.
    pub accept: Vec<String>,
}

impl From<Vec<EgressRule>> for PolicyPart {
    fn from(rules: Vec<EgressRule>) -> Self {
        Self { rules, accept: Vec::new() }
    }
}

impl From<Egress> for PolicyPart {
    fn from(egress: Egress) -> Self {
        Self { rules: egress.all_rules(), accept: egress.accept }
    }
}

/// Shows and changes the policies of existing Bodies.
#[derive(Debug, Clone, Copy)]
pub struct PolicyChanger<'a> {
    pub(super) fleet: &'a Fleet,
}

/// The answer of a running egress process.
struct ProcessAnswer {
    generation: u64,
    open: usize,
    closed: usize,
}

impl<'a> PolicyChanger<'a> {
    /// The changer for a fleet's Bodies.
    pub fn of(fleet: &'a Fleet) -> Self {
        Self { fleet }
    }

    /// The policy of a Body, and the state of its egress process.
    pub fn show(&self, id: &BodyId) -> Result<NetworkState, Failure> {
        run_blocking(|| {
            let spec = self.fleet.view(id)?.spec;
            let dir = BodyDir::at(self.fleet.body_path(id));
            let applied = match self.has_process(&dir, id)? {
                true => Some(self.ask_process(id, &EgressControl::Status)),
                false => None,
            };
            self.completed(&spec, state(&spec, applied.map(Result::ok)))
        })
    }

    /// Allows targets. A Body that runs with an egress process gets the new policy at once.
    pub fn allow(&self, id: &BodyId, targets: &[String]) -> Result<NetworkState, Failure> {
        self.add(id, targets.iter().map(EgressRule::allow).collect())
    }

    /// Lets other Bodies connect, each as `BODY:PORTS`.
    pub fn accept(&self, id: &BodyId, from: &[String]) -> Result<NetworkState, Failure> {
        self.change(id, PolicyChange::Add(PolicyPart { rules: Vec::new(), accept: from.to_vec() }))
    }

    /// No longer lets other Bodies connect, and closes their connections.
    pub fn reject(&self, id: &BodyId, from: &[String]) -> Result<NetworkState, Failure> {
        self.change(id, PolicyChange::Reject(from.to_vec()))
    }

    fn add(&self, id: &BodyId, rules: Vec<EgressRule>) -> Result<NetworkState, Failure> {
        self.change(id, PolicyChange::Add(rules.into()))
    }

    /// Lets connections to targets wait for a decision.
    pub fn ask(&self, id: &BodyId, targets: &[String]) -> Result<NetworkState, Failure> {
        self.add(id, targets.iter().map(EgressRule::ask).collect())
    }

    /// Denies targets, and closes connections to them.
    pub fn deny(&self, id: &BodyId, targets: &[String]) -> Result<NetworkState, Failure> {
        self.add(id, targets.iter().map(EgressRule::deny).collect())
    }

    /// Changes the policy of a Body.
    pub fn change(&self, id: &BodyId, change: PolicyChange) -> Result<NetworkState, Failure> {
        run_blocking(|| {
            self.apply(id, |spec| {
                let (egress, env) = self.fleet.egress().with_policy(spec);
                Ok(Spec { egress: Some(changed(egress, change)?), env, ..spec.clone() })
            })
        })
    }

    /// Gives a Body a spec with another policy or other secrets.
    pub(crate) fn apply(
        &self,
        id: &BodyId,
        change: impl FnOnce(&Spec) -> Result<Spec, Failure>,
    ) -> Result<NetworkState, Failure> {
        let (dir, spec, _lock) = self.fleet.lock_body(id)?;
        let new = change(&spec)?;
        check(&new.egress.iter().flat_map(Egress::all_rules).collect::<Vec<_>>())?;
        check_env(&new.env)?;
        if !self.has_process(&dir, id)? {
            self.store(&dir, &new, None)?;
            return self.completed(&new, state(&new, None));
        }
        let before = self.fleet.egress().current_orders(id);
        let orders = self.fleet.egress().orders(&new, before.as_ref())?;
        self.store(&dir, &new, Some(&orders))?;
        match self.ask_process(id, &EgressControl::Replace(Box::new(orders))) {
            Ok(applied) => self.completed(&new, state(&new, Some(Some(applied)))),
            Err(failure) if failure.kind == Kind::Usage => {
                // The process goes on with the earlier policy, so the log and the disk say the same.
                self.store(&dir, &spec, before.as_ref())?;
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    /// The state with what the spec does not say: the hosts of secrets, and the ceiling.
    fn completed(&self, spec: &Spec, state: NetworkState) -> Result<NetworkState, Failure> {
        let granted = |grant: &SecretGrant| GrantedSecret {
            name: grant.name.clone(),
            placeholder: grant.placeholder.clone(),
            hosts: self.fleet.secrets().find(&grant.name).map(|record| record.hosts).unwrap_or_default(),
        };
        let secrets = spec.egress.iter().flat_map(|egress| &egress.secrets).map(granted).collect();
        Ok(NetworkState { secrets, ceiling: self.fleet.egress().ceiling_of(&spec.id)?, ..state })
    }

    /// Writes a policy to the log, to the spec, and to the orders of an egress process that runs.
    fn store(&self, dir: &BodyDir, spec: &Spec, orders: Option<&EgressOrders>) -> Result<(), Failure> {
        let (id, egress) = (&spec.id, spec.egress.clone().unwrap_or_default());
        let secrets = egress.secrets.iter().map(|grant| grant.name.clone()).collect();
        let (generation, rules) = (egress.generation, egress.all_rules());
        let data = NetworkChanged { generation, rules, secrets, accept: egress.accept };
        self.fleet.write(id, data)?;
        let hint = "the policy may have changed in part; try again, or make room: pal gc";
        dir.rewrite_spec(spec).map_err(|error| failures::dir(id, error).hint(hint))?;
        if let Some(orders) = orders {
            EgressDir::of(self.fleet.data(), id).write_orders(orders).map_err(|error| {
                Failure::new(Kind::Host, format!("cannot store the network policy of Body {id}"))
                    .because(error)
                    .hint(hint)
            })?;
        }
        Ok(())
    }

    /// Whether the Body runs with an egress process.
    fn has_process(&self, dir: &BodyDir, id: &BodyId) -> Result<bool, Failure> {
        let condition = dir.condition().map_err(|error| failures::dir(id, error))?;
        let runs = matches!(condition, ProcessState::Running(_) | ProcessState::Paused(_));
        Ok(runs && EgressDir::of(self.fleet.data(), id).has_orders())
    }

    fn ask_process(&self, id: &BodyId, message: &EgressControl) -> Result<ProcessAnswer, Failure> {
        let reply = EgressDir::of(self.fleet.data(), id).ask(message).map_err(|error| {
            Failure::new(Kind::Host, format!("the egress process of Body {id} does not answer"))
                .because(error)
                .hint("a new policy is stored, and counts as soon as the process runs again")
                .hint(format!("to be sure, start the Body again: pal stop {id} && pal start {id}"))
        })?;
        match reply {
            EgressReply::State { generation, open, closed } => Ok(ProcessAnswer { generation, open, closed }),
            EgressReply::Refused { why } => Err(Failure::new(
                Kind::Usage,
                format!("the egress process of Body {id} refuses the policy: {}", fit_to_show(&why)),
            )
            .hint(format!("the earlier policy still counts: pal net show {id}"))),
        }
    }
}

/// The changed policy.
fn changed(old: Egress, change: PolicyChange) -> Result<Egress, Failure> {
    let PolicyPart { rules, accept } = match change {
        PolicyChange::Replace(part) => part,
        PolicyChange::Add(PolicyPart { rules: new, accept }) => {
            let kept =
                old.all_rules().into_iter().filter(|rule| !new.iter().any(|one| one.has_same_targets(rule)));
            let kept_accept = old.accept.iter().filter(|one| !accept.contains(one));
            PolicyPart {
                rules: new.iter().cloned().chain(kept).collect(),
                accept: kept_accept.chain(&accept).cloned().collect(),
            }
        }
        PolicyChange::Reject(from) => {
            if let Some(unknown) = from.iter().find(|one| !old.accept.contains(one)) {
                let message = format!("the policy accepts no {:?}", fit_to_show(unknown));
                let hint = "write it as the policy does: pal net show BODY";
                return Err(Failure::new(Kind::NotFound, message).hint(hint));
            }
            let accept = old.accept.iter().filter(|one| !from.contains(one)).cloned().collect();
            PolicyPart { rules: old.all_rules(), accept }
        }
    };
    check(&rules)?;
    check_accept(&accept)?;
    Ok(Egress { allow: Vec::new(), rules, generation: old.generation + 1, secrets: old.secrets, accept })
}

/// The state of a policy. `applied` is none if no egress process runs, and holds none if it does not answer.
fn state(spec: &Spec, applied: Option<Option<ProcessAnswer>>) -> NetworkState {
    let egress = spec.egress.clone().unwrap_or_default();
    let answer = applied.as_ref().and_then(Option::as_ref);
    let in_force = match &applied {
        None => PolicyForce::AtNextStart,
        Some(Some(answer)) if answer.generation == egress.generation => PolicyForce::Now,
        Some(_) => PolicyForce::AtRestart,
    };
    NetworkState {
        id: spec.id.clone(),
        policy: spec.egress.is_some(),
        rules: egress.all_rules(),
        secrets: Vec::new(),
        accept: egress.accept,
        ceiling: None,
        generation: egress.generation,
        in_force,
        open: answer.map(|answer| answer.open),
        closed: answer.map(|answer| answer.closed).filter(|closed| *closed > 0),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(egress: Option<Egress>) -> Spec {
        let spec = json!({
            "v": 1, "id": "k3v9", "created_at": "2026-01-01T00:00:00Z", "layer": "process", "template": "host",
            "limits": { "memory": 536870912, "cpu_milli": 1000, "pids": 256, "disk": 1073741824, "files": 1024,
                "inodes": 65536, "output": 1048576, "wall_ms": null }, "user": "user", "network": "closed", "life": "kept",
            "ids": { "users": [], "groups": [] },
        });
        Spec { egress, ..serde_json::from_value(spec).unwrap() }
    }

    fn shown(egress: &Egress) -> Vec<String> {
        egress.all_rules().iter().map(EgressRule::shown).collect()
    }

    #[test]
    fn a_new_rule_takes_the_place_of_one_about_the_same_target() {
        let secrets = vec![SecretGrant { name: "a".into(), placeholder: "palph0".into() }];
        let old = Egress { allow: vec!["a.test:443".into()], secrets: secrets.clone(), ..Egress::default() };
        let add = |egress: &Egress, rule| changed(egress.clone(), PolicyChange::Add(vec![rule].into()));
        let one = add(&old, EgressRule::deny("a.test:443")).unwrap();
        assert_eq!(shown(&one), ["deny a.test:443"]);
        let two = add(&one, EgressRule::allow("b.test:443").because("x")).unwrap();
        assert_eq!(shown(&two), ["allow b.test:443 (x)", "deny a.test:443"]);
        assert_eq!((two.generation, &two.secrets), (2, &secrets));
        let three = changed(two, PolicyChange::Replace(PolicyPart::default())).unwrap();
        assert_eq!((shown(&three), three.generation), (Vec::new(), 3));
        assert!(add(&one, EgressRule::allow("https://b.test")).is_err());
        // A rule about some requests to the target is another one, so a rule that denies them stays.
        let query: std::collections::BTreeMap<_, _> = [("a".to_owned(), "b".to_owned())].into();
        let some = EgressRule { query, ..EgressRule::deny("c.test:443") };
        let four = add(&add(&old, some).unwrap(), EgressRule::allow("c.test:443")).unwrap();
        assert_eq!(shown(&four), ["allow c.test:443", "deny c.test:443", "allow a.test:443"]);
    }

    #[test]
    fn accepted_bodies_are_added_once_and_taken_back() {
        let accept = |egress: Egress, from: &[&str]| {
            let accept = from.iter().map(|one| (*one).to_owned()).collect();
            changed(egress, PolicyChange::Add(PolicyPart { accept, ..PolicyPart::default() }))
        };
        let one =
            accept(Egress { allow: vec!["a.test:443".into()], ..Egress::default() }, &["app:1"]).unwrap();
        let two = accept(one, &["app:1", "web:2-3"]).unwrap();
        assert_eq!(
            (&*two.accept, shown(&two)),
            (&["app:1".to_owned(), "web:2-3".to_owned()][..], vec!["allow a.test:443".into()])
        );
        let reject =
            |egress: &Egress, from: &str| changed(egress.clone(), PolicyChange::Reject(vec![from.into()]));
        let three = reject(&two, "app:1").unwrap();
        assert_eq!(
            (&*three.accept, shown(&three)),
            (&["web:2-3".to_owned()][..], vec!["allow a.test:443".into()])
        );
        assert_eq!(reject(&three, "app:1").unwrap_err().kind, Kind::NotFound);
        assert_eq!(accept(three, &["app"]).unwrap_err().kind, Kind::Usage);
    }

    #[test]
    fn a_policy_without_a_process_counts_at_the_next_start() {
        assert_eq!(state(&spec(None), None).in_force, PolicyForce::AtNextStart);
    }

    #[test]
    fn a_policy_counts_when_the_process_has_its_number() {
        let spec = spec(Some(Egress { generation: 2, ..Egress::default() }));
        let force = |generation| {
            let applied = ProcessAnswer { generation, open: 1, closed: 0 };
            state(&spec, Some(Some(applied))).in_force
        };
        assert_eq!((force(2), force(1)), (PolicyForce::Now, PolicyForce::AtRestart));
        assert_eq!(state(&spec, Some(None)).in_force, PolicyForce::AtRestart);
    }
}
