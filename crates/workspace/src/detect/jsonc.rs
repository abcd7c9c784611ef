//! JSON with comments and trailing commas, as devcontainer.json allows it.

/// Removes comments and trailing commas from a JSON text.
pub fn plain_json(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text.chars().peekable();
    let mut quoted = false;
    while let Some(c) = rest.next() {
        match (c, quoted) {
            ('\\', true) => {
                out.push(c);
                out.extend(rest.next());
            }
            ('"', _) => {
                quoted = !quoted;
                out.push(c);
            }
            ('/', false) if rest.peek() == Some(&'/') => while rest.next_if(|c| *c != '\n').is_some() {},
            ('/', false) if rest.peek() == Some(&'*') => {
                let mut last = ' ';
                rest.next();
                for c in rest.by_ref() {
                    if (last, c) == ('*', '/') {
                        break;
                    }
                    last = c;
                }
            }
            ('}' | ']', false) => {
                let kept = out.trim_end().trim_end_matches(',').len();
                out.truncate(kept);
                out.push(c);
            }
            (c, _) => out.push(c),
        }
    }
    out
}
