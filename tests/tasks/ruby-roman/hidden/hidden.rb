require './lib/roman'

def expect(expected, found)
  return if expected == found

  puts "expected #{expected.inspect}, found #{found.inspect}"
  exit 1
end

def refused
  yield
  false
rescue ArgumentError
  true
end

{ 1 => 'I', 4 => 'IV', 9 => 'IX', 14 => 'XIV', 40 => 'XL', 90 => 'XC', 400 => 'CD', 1994 => 'MCMXCIV', 3999 => 'MMMCMXCIX' }.each do |number, text|
  expect(text, Roman.to_s(number))
end
(1..3999).each { |number| expect(number, Roman.to_i(Roman.to_s(number))) }
expect(14, Roman.to_i('xiv'))
['', 'IIII', 'IC', 'VX', 'ABC', 'X I', "X\n", 'MMMM'].each { |text| expect([text, true], [text, refused { Roman.to_i(text) }]) }
[0, 4000, -1].each { |number| expect(true, refused { Roman.to_s(number) }) }
