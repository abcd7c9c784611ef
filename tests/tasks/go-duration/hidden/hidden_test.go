package span

import (
	"testing"
	"time"
)

func TestGood(t *testing.T) {
	for text, expected := range map[string]time.Duration{
		"1h30m":      90 * time.Minute,
		"45s":        45 * time.Second,
		"2d":         48 * time.Hour,
		"1w2d3h4m5s": (9*24+3)*time.Hour + 4*time.Minute + 5*time.Second,
		"0s":         0,
		"15250w":     15250 * 7 * 24 * time.Hour,
	} {
		if found, err := Parse(text); err != nil || found != expected {
			t.Errorf("%s: %v %v", text, found, err)
		}
	}
}

func TestBad(t *testing.T) {
	for _, text := range []string{"", "5", "1h5", "h", "1m2h", "1h1h", "1y", "-1h", "99999999999w", "15250w2d", "99999999999999999999s", "2562048h"} {
		if found, err := Parse(text); err == nil {
			t.Errorf("%q gives %v", text, found)
		}
	}
}
