//! Stores, lists and removes secrets, and lets Bodies use them.

use std::collections::BTreeMap;

use body::BodyDir;
use proto::{
    BodyId, Failure, Kind, Spec,
    egress::{EgressOrders, EgressSecret, SECRETS_KEY, SecretFields, SshKeyOrder, SshLogin},
    event_data::{SecretRemoved, SecretStored},
    spec::{BodyRole, Egress, SecretGrant},
    text::visible,
};
use serde::Serialize;
use store::RecordTable;
use vault::SealKey;

use super::{
    SecretOrigin, SecretRecord, SecretSource, SecretTerms, grants,
    record::check_name,
    ssh,
    value::{self, stored_context},
};
use crate::{
    Fleet, Force, NetworkState, PolicyChanger,
    blocking::run_blocking,
    records::{SECRETS, key_of},
};

/// Most secrets of a data directory.
const SECRETS_OF_DATA_MAX: usize = 1000;

/// A secret as callers see it: without its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SecretView {
    /// Its name.
    pub name: String,
    /// The kind of its source: `stored`, `file`, `env` or `command`.
    pub source: &'static str,
    /// The hosts to which it may go.
    pub hosts: Vec<String>,
    /// The parts of a request in which it may stand.
    pub fields: SecretFields,
    /// The variables that hold its placeholder in a Body.
    pub env: Vec<String>,
    /// Whether git gets the placeholder as the password for its hosts.
    pub git: bool,
    /// How it logs in, if it is a private key of ssh.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh: Option<SshLogin>,
    /// The Bodies that may use it.
    pub bodies: Vec<BodyId>,
    /// The time at which it was last set.
    pub created_at: String,
}

/// The secrets of a data directory.
#[derive(Debug, Clone, Copy)]
pub struct Secrets<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl Secrets<'_> {
    /// All secrets, by name.
    pub fn list(&self) -> Result<Vec<SecretView>, Failure> {
        run_blocking(|| {
            let mut users: BTreeMap<String, Vec<BodyId>> = BTreeMap::new();
            for (id, grants) in self.grants()? {
                grants.into_iter().for_each(|grant| users.entry(grant.name).or_default().push(id.clone()));
            }
            let mut records = self.records()?;
            records.sort_by(|a, b| a.name.cmp(&b.name));
            let view = |record: SecretRecord| {
                let bodies = users.remove(&record.name).unwrap_or_default();
                view(record, bodies)
            };
            Ok(records.into_iter().map(view).collect())
        })
    }

    /// Stores a secret, or replaces it. Bodies that may use it get the new value; those that run, at once.
    pub fn set(&self, terms: SecretTerms) -> Result<SecretView, Failure> {
        run_blocking(|| {
            check_name(&terms.name)?;
            let record = self.record_of(terms)?;
            // A source that cannot be read is refused now, and not when a Body starts.
            self.value(&record)?;
            let name = record.name.clone();
            let known = self.records()?;
            if known.len() >= SECRETS_OF_DATA_MAX && !known.iter().any(|known| known.name == name) {
                return Err(Failure::new(
                    Kind::Limit,
                    format!("there are {SECRETS_OF_DATA_MAX} secrets already"),
                )
                .hint("remove one: pal secret rm NAME"));
            }
            self.fleet.log().note(SecretStored { secret: name.clone(), hosts: record.hosts.clone() })?;
            self.table().put(&key_of([&*name])?, &record)?;
            let users = self.users(&name)?;
            for id in &users {
                self.give(id, &record).map_err(|failure| {
                    failure.hint(format!("the secret {name} is stored; Body {id} gets it at its next start"))
                })?;
            }
            Ok(view(record, users))
        })
    }

    fn record_of(&self, mut terms: SecretTerms) -> Result<SecretRecord, Failure> {
        if let Some(login) = &mut terms.ssh {
            ssh::complete(login, &terms.hosts, self.fleet.host_variables);
        }
        let source = match &terms.origin {
            SecretOrigin::Value(text) => {
                let text = value::check(&terms.name, text.as_bytes().to_vec().into(), terms.ssh.is_some())?;
                let sealed = self.key()?.seal(&stored_context(&terms.name), text.as_bytes());
                SecretSource::Sealed(sealed.map_err(|error| {
                    Failure::new(Kind::Host, format!("cannot seal the secret {}", terms.name)).because(error)
                })?)
            }
            SecretOrigin::File(path) => SecretSource::File(path.clone()),
            SecretOrigin::Env(variable) => SecretSource::Env(variable.clone()),
            SecretOrigin::Command(argv) => SecretSource::Command(argv.clone()),
        };
        terms.into_record(source, store::clock::now())
    }

    /// Removes a secret, and returns the Bodies that it was taken from. Without force, no Body may have it.
    pub fn remove(&self, name: &str, force: Force) -> Result<Vec<BodyId>, Failure> {
        run_blocking(|| {
            self.find(name)?;
            let users = self.users(name)?;
            if let (Some(first), Force::No) = (users.first(), force) {
                let others = match users.len() - 1 {
                    0 => String::new(),
                    1 => " and 1 other".into(),
                    others => format!(" and {others} others"),
                };
                return Err(Failure::new(
                    Kind::Conflict,
                    format!("the secret {name} is in use by Body {first}{others}"),
                )
                .hint(format!("take it from all of them, and remove it: pal secret rm --force {name}"))
                .hint(format!("take it from one: pal secret revoke {first} {name}")));
            }
            for id in &users {
                self.take(id, name)?;
            }
            self.fleet.log().note(SecretRemoved { secret: name.to_owned() })?;
            self.table().remove(&key_of([name])?)?;
            Ok(users)
        })
    }

    /// Lets a Body use a secret: at once if it runs with an egress process, otherwise from its next start on. Its
    /// variables count for commands that start afterwards.
    pub fn grant(&self, id: &BodyId, name: &str) -> Result<NetworkState, Failure> {
        run_blocking(|| self.give(id, &self.find(name)?))
    }

    /// Takes a secret from a Body, at once.
    pub fn revoke(&self, id: &BodyId, name: &str) -> Result<NetworkState, Failure> {
        run_blocking(|| self.take(id, name))
    }

    fn give(&self, id: &BodyId, record: &SecretRecord) -> Result<NetworkState, Failure> {
        PolicyChanger::of(self.fleet).apply(id, |spec| {
            let (mut egress, mut env) = self.fleet.egress().with_policy(spec);
            if spec.role != BodyRole::Work {
                return Err(Failure::new(Kind::Usage, "a Body of a build or a preparation uses no secrets"));
            }
            grants::add_grant(&mut egress, &mut env, record)?;
            egress.generation += 1;
            Ok(Spec { egress: Some(egress), env, ..spec.clone() })
        })
    }

    fn take(&self, id: &BodyId, name: &str) -> Result<NetworkState, Failure> {
        let records = self.records()?;
        PolicyChanger::of(self.fleet).apply(id, |spec| {
            let (mut egress, mut env) = (spec.egress.clone().unwrap_or_default(), spec.env.clone());
            let is_other =
                |record: &&SecretRecord| egress.secrets.iter().any(|grant| grant.name == record.name);
            let others: Vec<SecretRecord> = records.iter().filter(is_other).cloned().collect();
            if !grants::remove_grant(&mut egress, &mut env, name, &others) {
                return Err(Failure::new(
                    Kind::NotFound,
                    format!("Body {id} does not have the secret {:?}", visible(name)),
                )
                .hint(format!("its secrets: pal net show {id}")));
            }
            egress.generation += 1;
            Ok(Spec { egress: Some(egress), env, ..spec.clone() })
        })
    }

    /// Gives the secrets of these grants to the orders of an egress process, with values that are read now. `kept` has the
    /// orders that the process already has: a value that cannot be read now stays as it is.
    pub(crate) fn give_to_process(
        &self,
        orders: &mut EgressOrders,
        grants: &[SecretGrant],
        kept: Option<&EgressOrders>,
        key: &SealKey,
    ) -> Result<(), Failure> {
        for grant in grants {
            let name = &grant.name;
            let kept_secret = kept.and_then(|kept| {
                kept.secrets.iter().find(|kept| kept.name == *name && kept.placeholder == grant.placeholder)
            });
            let kept_key = kept.and_then(|kept| kept.ssh_keys.iter().find(|kept| kept.name == *name));
            match (self.sealed(grant, key), kept_secret, kept_key) {
                (Ok(SealedGrant::Secret(secret)), ..) => orders.secrets.push(secret),
                (Ok(SealedGrant::SshKey(order)), ..) => orders.ssh_keys.push(order),
                (Err(_), Some(secret), _) => orders.secrets.push(secret.clone()),
                (Err(_), None, Some(order)) => orders.ssh_keys.push(order.clone()),
                (Err(failure), None, None) => return Err(failure),
            }
        }
        Ok(())
    }

    fn sealed(&self, grant: &SecretGrant, key: &SealKey) -> Result<SealedGrant, Failure> {
        let SecretGrant { name, placeholder } = grant.clone();
        let record = self.find(&name)?;
        let sealed = self.sealed_value(&record, key)?;
        let SecretRecord { hosts, fields, ssh, .. } = record;
        Ok(match ssh {
            Some(login) => SealedGrant::SshKey(SshKeyOrder { name, hosts, login, sealed }),
            None => SealedGrant::Secret(EgressSecret { name, placeholder, hosts, fields, sealed }),
        })
    }

    /// The value of a secret, sealed for egress processes.
    pub(crate) fn sealed_value(&self, record: &SecretRecord, key: &SealKey) -> Result<String, Failure> {
        let value = self.value(record)?;
        let SecretRecord { name, ssh, .. } = record;
        let purpose = if ssh.is_some() { "ssh key" } else { "secret" };
        key.seal(&format!("{purpose} {name}"), value.as_bytes()).map_err(|error| {
            Failure::new(Kind::Host, format!("cannot seal the secret {name}")).because(error)
        })
    }

    fn value(&self, record: &SecretRecord) -> Result<vault::Zeroizing<String>, Failure> {
        value::read(record, &self.key()?, self.fleet.host_variables)
    }

    /// The key that seals values of this data directory.
    pub(crate) fn key(&self) -> Result<SealKey, Failure> {
        let path = self.fleet.data().join(SECRETS_KEY);
        SealKey::read_or_create(&path).map_err(|error| {
            Failure::new(Kind::Host, format!("cannot use the key of secrets, {}", path.display()))
                .because(error)
                .hint("restore the file from a backup; without it, remove it and set all secrets again")
        })
    }

    /// The record of a secret.
    pub(crate) fn find(&self, name: &str) -> Result<SecretRecord, Failure> {
        let stored = match check_name(name) {
            Ok(()) => self.table().get(&key_of([name])?)?,
            Err(_) => None,
        };
        let Some(stored) = stored else {
            let mut names: Vec<String> = self.records()?.into_iter().map(|record| record.name).collect();
            names.sort();
            let hint = match names.is_empty() {
                true => "store one: pal secret set NAME --to HOST".to_owned(),
                false => format!("the secrets are {}", names.join(", ")),
            };
            return Err(
                Failure::new(Kind::NotFound, format!("there is no secret {:?}", visible(name))).hint(hint)
            );
        };
        Ok(stored.value)
    }

    fn records(&self) -> Result<Vec<SecretRecord>, Failure> {
        Ok(self.table().values(None)?)
    }

    fn table(&self) -> RecordTable<'_, SecretRecord> {
        self.fleet.table(SECRETS)
    }

    /// The Bodies that may use a secret.
    fn users(&self, name: &str) -> Result<Vec<BodyId>, Failure> {
        let has_it = |(_, grants): &(BodyId, Vec<SecretGrant>)| grants.iter().any(|grant| grant.name == name);
        Ok(self.grants()?.into_iter().filter(has_it).map(|(id, _)| id).collect())
    }

    /// The grants of all Bodies.
    fn grants(&self) -> Result<Vec<(BodyId, Vec<SecretGrant>)>, Failure> {
        let mut all = Vec::new();
        for id in self.fleet.ids()? {
            // A Body without a readable spec is being made or removed.
            let Ok(spec) = BodyDir::at(self.fleet.body_path(&id)).spec() else { continue };
            let secrets = spec.egress.map(|Egress { secrets, .. }| secrets).unwrap_or_default();
            if !secrets.is_empty() {
                all.push((id, secrets));
            }
        }
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(all)
    }
}

/// A secret for an egress process.
enum SealedGrant {
    Secret(EgressSecret),
    SshKey(SshKeyOrder),
}

fn view(record: SecretRecord, bodies: Vec<BodyId>) -> SecretView {
    let SecretRecord { name, source, hosts, fields, env, git, prefix: _, ssh, created_at } = record;
    SecretView { name, source: source.kind(), hosts, fields, env, git, ssh, bodies, created_at }
}
