//! The rules of the preset `git`: the hosts of a repository's remotes.

use proto::{
    Failure, Kind,
    egress::{EgressRule, canonical_name},
};

/// Most remotes that make rules.
const REMOTES_MAX: usize = 32;

/// One rule for each host and port of these addresses. An address of a local repository makes none.
pub(super) fn remote_rules(remotes: &[String]) -> Result<Vec<EgressRule>, Failure> {
    let mut rules: Vec<EgressRule> = Vec::new();
    for rule in remotes.iter().filter_map(|remote| remote_rule(remote)) {
        if !rules.contains(&rule) {
            rules.push(rule);
        }
    }
    rules.truncate(REMOTES_MAX);
    if rules.is_empty() {
        return Err(Failure::new(
            Kind::Usage,
            "the network preset `git` needs a repository with a remote at an https or ssh address",
        )
        .hint("list the remotes: git remote -v")
        .hint("or name the host: --allow github.com:443"));
    }
    Ok(rules)
}

/// The rule for the host of a remote.
fn remote_rule(address: &str) -> Option<EgressRule> {
    let (scheme, rest) = match address.split_once("://") {
        Some((scheme, rest)) => (scheme, rest.split(['/', '?', '#']).next()?),
        // The short form of ssh: [USER@]HOST:PATH.
        None => ("ssh", address.split_once(':').map(|(host, _)| host).filter(|host| !host.contains('/'))?),
    };
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    let (host, port) = match place.rsplit_once(':') {
        Some((host, port)) if address.contains("://") => (host, Some(port)),
        _ => (place, None),
    };
    let (usual, protocol) = match scheme {
        "https" => (443, "tls"),
        "ssh" | "git+ssh" | "ssh+git" => (22, "tcp"),
        "http" => (80, "http"),
        _ => return None,
    };
    let port = match port {
        Some(port) if !port.is_empty() => port.parse::<u16>().ok().filter(|port| *port != 0)?,
        _ => usual,
    };
    let host = canonical_name(host)?;
    // The protocol without a mark follows from the port.
    let mark = match (port, protocol) {
        (443, "tls") | (80, "http") => String::new(),
        (443 | 80, _) | (_, "tls" | "http") => format!("+{protocol}"),
        _ => String::new(),
    };
    Some(EgressRule::allow(format!("{host}:{port}{mark}")).because("a remote of the repository"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_a_remote_is_a_rule() {
        for (address, rule) in [
            ("https://github.com/a/b.git", Some("github.com:443")),
            ("https://user:pass@GitHub.com/a/b", Some("github.com:443")),
            ("https://git.corp.test:8443/a", Some("git.corp.test:8443+tls")),
            ("http://git.corp.test/a", Some("git.corp.test:80")),
            ("ssh://git@git.corp.test:2222/a", Some("git.corp.test:2222")),
            ("ssh://git@ssh.github.com:443/a/b", Some("ssh.github.com:443+tcp")),
            ("git@github.com:a/b.git", Some("github.com:22")),
            ("github.com:a/b.git", Some("github.com:22")),
            ("https://evil.test#@github.com/a", Some("evil.test:443")),
            ("https://[2001:db8::1]/a", None),
            ("https://192.0.2.1/a", None),
            ("git://git.test/a", None),
            ("file:///srv/a", None),
            ("/srv/a.git", None),
            ("./a:b", None),
            ("../a", None),
            ("https://a test/b", None),
            ("https://a.test:99999/b", None),
            ("*:x", None),
            ("", None),
        ] {
            assert_eq!(remote_rule(address).map(|rule| rule.to).as_deref(), rule, "{address}");
        }
        let remotes = ["git@a.test:x".to_owned(), "git@a.test:y".to_owned(), "/srv/z".to_owned()];
        assert_eq!(remote_rules(&remotes).unwrap().len(), 1);
        assert!(remote_rules(&["/srv/z".to_owned()]).is_err());
    }
}
