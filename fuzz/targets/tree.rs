//! A tree of files from a hostile sender: however it is cut, the reader returns the same items, and no path
//! leaves the tree.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::tree::{TreeError, TreeForm, TreeItem, TreeReader, check_path, write};

fn read(pieces: &[&[u8]]) -> (Vec<TreeItem>, TreeForm, Result<(), TreeError>) {
    let mut reader = TreeReader::default();
    let mut items = Vec::new();
    for piece in pieces {
        reader.push(piece);
        loop {
            match reader.next() {
                Ok(Some(item)) => items.push(item),
                Ok(None) => break,
                Err(error) => return (items, reader.form(), Err(error)),
            }
        }
    }
    (items, reader.form(), reader.finish())
}

fuzz_target!(|input: &[u8]| {
    let (stream, pieces) = fuzz::cut(input);
    let cut = read(&pieces);
    assert_eq!(cut, read(&[stream]));
    let (items, form, _) = cut;
    let mut again = form.magic()[..].into();
    for item in &items {
        if let TreeItem::Dir { path, .. }
        | TreeItem::File { path, .. }
        | TreeItem::Link { path, .. }
        | TreeItem::Same { path, .. }
        | TreeItem::Omitted { path, .. } = item
        {
            assert_eq!(check_path(path), Ok(()));
        }
        write(item, &mut again);
    }
    assert_eq!(read(&[&again]).0, items, "what was read can be written and read again");
});
