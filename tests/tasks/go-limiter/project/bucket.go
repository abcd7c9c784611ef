// Package limiter limits events per second.
package limiter

import "time"

// Bucket is not safe for several goroutines.
type Bucket struct {
	Now    func() time.Time
	rate   int
	burst  int
	tokens int
	last   time.Time
}

// New makes a full bucket.
func New(rate, burst int) *Bucket {
	return &Bucket{Now: time.Now, rate: rate, burst: burst, tokens: burst}
}

// Allow takes one token, if there is one.
func (b *Bucket) Allow() bool {
	now := b.Now()
	if b.last.IsZero() {
		b.last = now
	}
	b.tokens += int(now.Sub(b.last).Seconds()) * b.rate
	b.last = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
