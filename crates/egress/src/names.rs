//! The addresses that stand for names: the resolver gives each name one, and a connection to it is a connection to the
//! name.
//!
//! Invariant: an address stands for one name as long as the Body lives: each pair is in the spool before a program
//! learns of it, and a process that replaces this one reads the pairs from there.
//! Invariant: a Body has at most [`NAMES_MAX`] names, so a flood of them ends.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr},
};

use proto::egress::{DecisionKind, NAMED_BITS, NAMED_FIRST, SpoolLine, is_named_address};

/// Most names of one Body.
const NAMES_MAX: usize = 4096;
/// The addresses of one /24 that stand for names: some programs take the first and the last for no host's.
const FIRST_LAST: std::ops::RangeInclusive<u8> = 1..=254;

/// The names of one Body.
#[derive(Debug, Default)]
pub struct NameTable {
    by_name: HashMap<String, Ipv4Addr>,
    by_address: HashMap<Ipv4Addr, String>,
    /// The distance of the last address from the first one of the range.
    last: u32,
}

impl NameTable {
    /// Notes a line of the spool: an earlier process of the Body may have recorded a pair in it.
    pub fn note(&mut self, line: &SpoolLine) {
        if let (DecisionKind::Named, Some(IpAddr::V4(address))) = (line.kind, line.data.address) {
            self.insert(line.data.to.clone(), address);
        }
    }

    /// The address of a name; if it has none yet, `record` records the pair first. None if the Body has too many names.
    pub fn address_of(
        &mut self,
        name: &str,
        record: impl FnOnce(Ipv4Addr) -> io::Result<()>,
    ) -> io::Result<Option<Ipv4Addr>> {
        if let Some(address) = self.by_name.get(name) {
            return Ok(Some(*address));
        }
        if self.by_name.len() >= NAMES_MAX {
            return Ok(None);
        }
        let Some(address) = self.next() else { return Ok(None) };
        // A pair that may be in the spool uses its address up, even if recording it failed.
        self.last = address.to_bits() - NAMED_FIRST.to_bits();
        record(address)?;
        self.insert(name.to_owned(), address);
        Ok(Some(address))
    }

    /// The name that an address stands for.
    pub fn name_of(&self, address: Ipv4Addr) -> Option<&str> {
        self.by_address.get(&address).map(String::as_str)
    }

    fn next(&self) -> Option<Ipv4Addr> {
        let range = self.last + 1..1 << (32 - NAMED_BITS);
        let mut addresses = range.map(|distance| Ipv4Addr::from_bits(NAMED_FIRST.to_bits() + distance));
        addresses.find(|address| FIRST_LAST.contains(&address.octets()[3]))
    }

    fn insert(&mut self, name: String, address: Ipv4Addr) {
        let new = !self.by_name.contains_key(&name) && !self.by_address.contains_key(&address);
        if !is_named_address(address) || !new || self.by_name.len() >= NAMES_MAX {
            return;
        }
        self.last = self.last.max(address.to_bits() - NAMED_FIRST.to_bits());
        self.by_address.insert(address, name.clone());
        self.by_name.insert(name, address);
    }
}

#[cfg(test)]
mod tests {
    use proto::egress::{Decision, LINE_LEN_MAX};

    use super::*;
    use crate::journal::read_lines;

    fn read(spool: &str) -> NameTable {
        let mut table = NameTable::default();
        read_lines(spool.as_bytes(), |line| table.note(&line)).unwrap();
        table
    }

    fn line(name: &str, address: [u8; 4]) -> String {
        let data = Decision::named(name, IpAddr::from(address));
        serde_json::to_string(&SpoolLine { kind: DecisionKind::Named, at_us: 1, data }).unwrap() + "\n"
    }

    #[test]
    fn an_address_stands_for_one_name_also_after_a_restart() {
        let mut table = NameTable::default();
        let mut spool = String::from("{\"half a li\n");
        for number in 0..600 {
            let name = format!("a{number}.test");
            let found = table.address_of(&name, |address| {
                spool.push_str(&line(&name, address.octets()));
                Ok(())
            });
            let address = found.unwrap().unwrap();
            assert!(is_named_address(address) && !matches!(address.octets()[3], 0 | 255), "{address}");
            assert_eq!(table.name_of(address), Some(name.as_str()));
        }
        let again = read(&spool);
        assert_eq!((again.by_name, again.last), (table.by_name, table.last));
        // Lines that contradict earlier ones, and lines of other addresses, change nothing.
        let odd = [
            line("a.test", [198, 18, 0, 1]),
            line("b.test", [198, 18, 0, 1]),
            line("a.test", [198, 18, 0, 9]),
            line("c.test", [192, 0, 2, 1]),
            "x".repeat(2 * LINE_LEN_MAX) + "\n",
            line("d.test", [198, 18, 0, 2]),
        ];
        let table = read(&odd.concat());
        assert_eq!(table.name_of([198, 18, 0, 1].into()), Some("a.test"));
        assert_eq!(table.name_of([198, 18, 0, 2].into()), Some("d.test"));
        assert_eq!(table.by_name.len(), 2);
    }

    #[test]
    fn a_pair_that_cannot_be_recorded_is_not_told_and_its_address_stays_unused() {
        let mut table = NameTable::default();
        assert!(table.address_of("a.test", |_| Err(io::ErrorKind::StorageFull.into())).is_err());
        assert_eq!(table.address_of("b.test", |_| Ok(())).unwrap(), Some([198, 18, 0, 2].into()));
        assert_eq!(table.name_of([198, 18, 0, 1].into()), None);
        for number in 1..NAMES_MAX {
            table.address_of(&format!("a{number}.test"), |_| Ok(())).unwrap().unwrap();
        }
        assert_eq!(table.address_of("more.test", |_| Ok(())).unwrap(), None);
        assert!(table.address_of("b.test", |_| Ok(())).unwrap().is_some(), "names that have one keep it");
    }
}
