//! Lists in pages; each page has a cursor for the next one.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use proto::{Failure, Kind};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

const LIMIT_DEFAULT: usize = 100;
const LIMIT_MAX: usize = 1000;
const CURSOR_LEN_MAX: usize = 256;

/// Which page of a list to return.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// The largest number of items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    pub limit: Option<u16>,
    /// The cursor of the page: `next` of the page before it.
    #[param(max_length = 256)]
    pub cursor: Option<String>,
}

impl PageQuery {
    /// The number of items on the page.
    pub fn limit(&self) -> Result<usize, Failure> {
        limit(self.limit.map(u64::from))
    }

    /// The position after which the page begins, in a list whose cursors are positions; 0 begins with the
    /// first item.
    pub fn position(&self) -> Result<u64, Failure> {
        let Some(cursor) = &self.cursor else { return Ok(0) };
        read(cursor)?.parse().map_err(|_| unknown_cursor())
    }
}

/// Checks a requested page size, and applies the default.
pub fn limit(asked: Option<u64>) -> Result<usize, Failure> {
    match asked {
        None => Ok(LIMIT_DEFAULT),
        Some(limit) if (1..=LIMIT_MAX as u64).contains(&limit) => Ok(limit as usize),
        Some(limit) => Err(Failure::new(Kind::Usage, format!("`limit` cannot be {limit}"))
            .hint(format!("ask for 1 to {LIMIT_MAX}"))),
    }
}

/// A page of a list.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Page<T> {
    /// The items of the page, oldest first.
    pub items: Vec<T>,
    /// The cursor of the next page; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub next: Option<String>,
}

/// Cuts a page out of a list that is sorted by `key`.
pub fn page<T>(items: Vec<T>, query: &PageQuery, key: impl Fn(&T) -> String) -> Result<Page<T>, Failure> {
    let limit = query.limit()?;
    let after = query.cursor.as_deref().map(read).transpose()?;
    let rest = items.into_iter().filter(|item| after.as_ref().is_none_or(|after| key(item) > *after));
    Ok(Page::cut(rest, limit, &key))
}

impl<T> Page<T> {
    /// Makes a page of the first items; there is a next page if more items follow.
    pub fn cut(rest: impl IntoIterator<Item = T>, limit: usize, key: impl Fn(&T) -> String) -> Self {
        let mut rest = rest.into_iter();
        let items: Vec<T> = rest.by_ref().take(limit).collect();
        let next = rest.next().and(items.last()).map(|last| URL_SAFE_NO_PAD.encode(key(last)));
        Self { items, next }
    }
}

fn unknown_cursor() -> Failure {
    Failure::new(Kind::Usage, "the cursor is invalid").hint("take `next` of the page before, or leave it out")
}

fn read(cursor: &str) -> Result<String, Failure> {
    if cursor.len() > CURSOR_LEN_MAX {
        return Err(unknown_cursor());
    }
    let bytes = URL_SAFE_NO_PAD.decode(cursor).map_err(|_| unknown_cursor())?;
    String::from_utf8(bytes).map_err(|_| unknown_cursor())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_hold_everything_once_also_when_the_list_changes_in_between() {
        let list = |numbers: std::ops::Range<u32>| numbers.map(|n| format!("{n:03}")).collect::<Vec<_>>();
        let mut query = PageQuery { limit: Some(4), cursor: None };
        let mut seen = Vec::new();
        loop {
            // The first items are removed while a client reads the pages.
            let from = if seen.is_empty() { 0 } else { 2 };
            let page = page(list(from..10), &query, String::clone).unwrap();
            seen.extend(page.items);
            match page.next {
                Some(next) => query.cursor = Some(next),
                None => break,
            }
        }
        assert_eq!(seen, list(0..10));
    }

    #[test]
    fn odd_pages_are_refused() {
        for query in [
            PageQuery { limit: Some(0), cursor: None },
            PageQuery { limit: Some(1001), cursor: None },
            PageQuery { limit: None, cursor: Some("not base64!".into()) },
            PageQuery { limit: None, cursor: Some("a".repeat(300)) },
        ] {
            assert_eq!(
                page(vec![String::new()], &query, String::clone).unwrap_err().kind,
                Kind::Usage,
                "{query:?}"
            );
        }
    }
}
