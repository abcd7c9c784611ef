//! Text in aligned columns.

use proto::text::visible;

/// Rows with a head; each column is as wide as its widest cell.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(|cell| (*cell).to_owned()).collect()] }
    }

    /// A table without a head.
    pub fn bare() -> Self {
        Self { rows: Vec::new() }
    }

    /// Adds a row; escapes the cells for a terminal.
    pub fn row<const N: usize>(&mut self, cells: [&str; N]) {
        self.rows.push(cells.iter().map(|cell| visible(cell)).collect());
    }

    /// Removes the columns in which every cell below the head is `-`.
    pub fn drop_blank_columns(&mut self) {
        let columns = self.rows.first().map_or(0, Vec::len);
        for column in (0..columns).rev() {
            if self.rows.len() > 1 && self.rows[1..].iter().all(|row| row[column] == "-") {
                self.rows.iter_mut().for_each(|row| drop(row.remove(column)));
            }
        }
    }

    /// The text, with `indent` in front of each line.
    pub fn render(&self, indent: &str) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width =
            |column: usize| self.rows.iter().filter_map(|row| row.get(column)).map(|cell| len(cell)).max();
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::from(indent);
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(cell);
                line.extend(std::iter::repeat_n(' ', width - len(cell) + 2));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

fn len(cell: &str) -> usize {
    cell.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_that_says_nothing_is_left_out() {
        let mut table = Table::new(&["ID", "NAME", "WORK"]);
        table.row(["a", "-", "-"]);
        table.row(["b", "-", "landed"]);
        table.drop_blank_columns();
        assert_eq!(table.render(""), "ID  WORK\na   -\nb   landed\n");
    }

    #[test]
    fn columns_are_aligned_and_escapes_are_shown() {
        let mut table = Table::new(&["ID", "NAME"]);
        table.row(["a", "é"]);
        table.row(["long", "x\x1by"]);
        assert_eq!(table.render(" "), " ID    NAME\n a     é\n long  x\\u{1b}y\n");
    }
}
