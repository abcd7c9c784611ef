// Package span reads spans of time.
package span

import (
	"fmt"
	"time"
)

var units = []struct {
	letter byte
	length time.Duration
}{
	{'h', time.Hour},
	{'m', time.Minute},
	{'s', time.Second},
}

// Parse reads a span such as 1h30m.
func Parse(text string) (time.Duration, error) {
	var total, number time.Duration
	for i := 0; i < len(text); i++ {
		c := text[i]
		if c >= '0' && c <= '9' {
			number = number*10 + time.Duration(c-'0')
			continue
		}
		found := false
		for _, unit := range units {
			if unit.letter == c {
				total += number * unit.length
				number, found = 0, true
			}
		}
		if !found {
			return 0, fmt.Errorf("unknown unit %q in %q", c, text)
		}
	}
	return total, nil
}
