// Package ring keeps the newest values of a stream.
package ring

// Ring holds at most as many values as its size.
type Ring[T any] struct {
	values []T
	next   int
	full   bool
}

// New makes a ring of a size of at least 1.
func New[T any](size int) *Ring[T] {
	return &Ring[T]{values: make([]T, size)}
}

// Push adds a value, and forgets the oldest one if the ring is full.
func (r *Ring[T]) Push(value T) {
	r.values[r.next] = value
	r.next++
	if r.next == len(r.values) {
		r.next = 0
		r.full = true
	}
}

// Values returns the values, oldest first.
func (r *Ring[T]) Values() []T {
	if r.full {
		return append([]T{}, r.values...)
	}
	return append([]T{}, r.values[:r.next]...)
}
